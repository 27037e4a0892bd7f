//! Attackers that dial into a mesh, or intercept its connections: none of them gets a link.

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use rustix::process::geteuid;
use ryzanstein_config::{EncryptionChoice, SecurityConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

use super::accept::{Acceptor, Arrivals};
use super::dial::Dialler;
use super::prove::{LinkError, LinkId, Prover};
use super::{Bound, unix};
use crate::link::security::handshake::{OPENING, PROOF};
use crate::link::security::{Channel, Handshake, HandshakeError, Mismatch, Protection, Protocol, Security};
use crate::membership::half_open::HalfOpen;
use crate::membership::roster::Secret;
use crate::testing::LATE;
use crate::types::rank::{Epoch, Rank};
use crate::types::sync::lock;

/// Far enough in the future that it causes no rejection.
const NEVER: Duration = Duration::from_secs(3600);
const OURS: Secret = Secret::new([7; 32]);
const EPOCH: Epoch = Epoch(2);
const BOTH: [EncryptionChoice; 2] = [EncryptionChoice::Off, EncryptionChoice::On];

/// Remembers the labels of every rejected connection.
#[derive(Default)]
struct Refusals(Mutex<Vec<String>>);

impl Recorder for Refusals {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let labels: Vec<&str> = key.labels().map(metrics::Label::value).collect();
        lock(&self.0).push(format!("{} {}", key.name(), labels.join(" ")));
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// Runs a test against a rank that accepts links, with these settings; the rejections must have these reasons, one each.
fn refuses<F: Future<Output = ()>>(
    encryption: EncryptionChoice,
    reasons: &[&str],
    attack: impl FnOnce(SocketAddr) -> F,
) {
    with_room_for(HalfOpen::default(), security(encryption), reasons, attack);
}

fn with_room_for<F: Future<Output = ()>>(
    half_open: HalfOpen,
    security: Security,
    reasons: &[&str],
    attack: impl FnOnce(SocketAddr) -> F,
) {
    let refusals = Refusals::default();
    let counted = || lock(&refusals.0).clone();
    let expected: Vec<String> =
        reasons.iter().map(|reason| format!("ryz_connections_refused_total data {reason}")).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    metrics::with_local_recorder(&refusals, || {
        runtime.block_on(async {
            let bound = Bound::new(Ipv4Addr::LOCALHOST.into()).unwrap();
            let address = bound.address();
            let arrivals = Arc::new(Arrivals::default());
            let prover = Arc::new(prover(OURS, security));
            let acceptor = Acceptor { epoch: EPOCH, me: Rank(0), prover, arrivals: Arc::clone(&arrivals) };
            tokio::spawn(acceptor.accept(bound, half_open));
            let whole = async {
                attack(address).await;
                while counted().len() < expected.len() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            let ended = tokio::time::timeout(LATE, whole).await;
            assert!(ended.is_ok(), "refused {:?} so far, expected {expected:?}", counted());
            assert_eq!(counted(), expected);
        });
    });
}

fn security(encryption: EncryptionChoice) -> Security {
    Security::new(&SecurityConfig { encryption }).unwrap()
}

fn prover(secret: Secret, security: Security) -> Prover {
    Prover { handshake: Handshake { protocol: Protocol::Data, secret, security }, limit: NEVER }
}

fn link(epoch: Epoch) -> LinkId {
    LinkId::new(epoch, "world", Rank(1), Rank(0))
}

async fn dial(to: SocketAddr, secret: Secret, security: Security, id: LinkId) -> Result<Channel, LinkError> {
    let stream = TcpStream::connect(to).await?;
    let here = security.protection(to.ip());
    prover(secret, security).dial(stream, here, &id).await
}

/// Sends these bytes to the address, and waits until it closes the connection.
async fn say(address: SocketAddr, words: &[u8]) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // It may close the connection before it has read all bytes.
    let _ = stream.write_all(words).await;
    let _ = stream.read_to_end(&mut Vec::new()).await;
}

#[test]
fn who_knows_the_secret_gets_in_and_another_secret_is_refused() {
    for encryption in BOTH {
        refuses(encryption, &["secret"], async |address| {
            dial(address, OURS, security(encryption), link(EPOCH)).await.expect("a link");
            let refused =
                dial(address, Secret::new([8; 32]), security(encryption), link(EPOCH)).await.unwrap_err();
            assert!(matches!(refused, LinkError::Handshake(HandshakeError::WrongSecret)), "{refused}");
        });
    }
}

#[test]
fn who_has_no_secret_is_refused_whatever_it_says() {
    for encryption in BOTH {
        refuses(encryption, &["protocol", "protocol", "secret"], async |address| {
            say(address, b"GET / HTTP/1.1\r\n\r\n").await;
            // The first bytes of an ordinary TLS client.
            say(address, &[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3]).await;
            let protection = security(encryption).protection(address.ip());
            say(address, &[&opening(protection)[..], &[0; PROOF]].concat()).await;
        });
    }
}

#[test]
fn a_recorded_handshake_opens_no_second_link() {
    for encryption in BOTH {
        refuses(encryption, &["secret"], async |address| {
            let middle = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let honest = async {
                drop(
                    dial(middle.local_addr().unwrap(), OURS, security(encryption), link(EPOCH))
                        .await
                        .expect("a link"),
                );
            };
            let (said, ()) = tokio::join!(record(&middle, address), honest);
            assert!(said.len() > OPENING + 2 * PROOF);
            say(address, &said).await;
        });
    }
}

/// Passes a connection on, and returns the bytes that its maker sent.
async fn record(middle: &TcpListener, address: SocketAddr) -> Vec<u8> {
    let mut from = middle.accept().await.unwrap().0;
    let mut to = TcpStream::connect(address).await.unwrap();
    let ((mut hear, mut answer), (mut back, mut forth)) = (from.split(), to.split());
    let listen = async {
        let (mut said, mut bytes) = (Vec::new(), [0; 4096]);
        loop {
            match hear.read(&mut bytes).await {
                Ok(n) if n > 0 => {
                    said.extend_from_slice(&bytes[..n]);
                    forth.write_all(&bytes[..n]).await.unwrap();
                }
                _ => return said,
            }
        }
    };
    let answers = async {
        let _ = copy(&mut back, &mut answer).await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        said = listen => said,
        () = answers => unreachable!("it waits for the other"),
    }
}

#[test]
fn outsiders_do_not_evict_a_rank_that_has_proved_itself_and_still_encrypts() {
    let on = security(EncryptionChoice::On);
    with_room_for(HalfOpen::at_most(1), on, &["evicted"], async |address| {
        let middle = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let honest = dial(middle.local_addr().unwrap(), OURS, security(EncryptionChoice::On), link(EPOCH));
        let slow = async {
            let mut from = middle.accept().await.unwrap().0;
            let mut to = TcpStream::connect(address).await.unwrap();
            pass_on_clear(&mut from, &mut to).await;
            // TLS begins only after a correct proof.
            let ((mut hear, mut answer), (mut back, mut forth)) = (from.split(), to.split());
            let mut first = [0; 1];
            tokio::select! {
                _ = copy(&mut hear, &mut forth) => unreachable!("it waits for the other"),
                read = back.read_exact(&mut first) => read.unwrap(),
            };
            let mut outsiders = Vec::new();
            for _ in 0..2 {
                outsiders.push(hesitate(TcpStream::connect(address).await.unwrap()).await);
            }
            answer.write_all(&first).await.unwrap();
            let _ = copy_bidirectional(&mut from, &mut to).await;
            drop(outsiders);
        };
        tokio::select! {
            link = honest => drop(link.expect("a link")),
            () = slow => unreachable!("the link ends it"),
        }
    });
}

/// Passes on all that comes before TLS, as both ends know the secret.
async fn pass_on_clear(client: &mut TcpStream, server: &mut TcpStream) {
    pass(client, server, OPENING).await;
    pass(server, client, OPENING + PROOF).await;
    pass(client, server, PROOF).await;
}

async fn pass(from: &mut TcpStream, to: &mut TcpStream, length: usize) {
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes).await.unwrap();
    to.write_all(&bytes).await.unwrap();
}

/// Returns an opening of one who does not know the secret.
fn opening(protection: Protection) -> [u8; OPENING] {
    let stranger = prover(Secret::new([1; 32]), security(EncryptionChoice::Auto));
    stranger.handshake.opening(protection).unwrap()
}

/// Opens, waits for the answer, and sends no proof.
async fn hesitate<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S) -> S {
    stream.write_all(&opening(Protection::Clear)).await.unwrap();
    stream.read_exact(&mut [0; OPENING + PROOF]).await.unwrap();
    stream
}

#[test]
fn who_proves_nothing_at_the_unix_socket_keeps_nobody_out() {
    with_room_for(HalfOpen::at_most(1), security(EncryptionChoice::Auto), &["evicted"], async |address| {
        let mut silent = hesitate(unix::dial(address, geteuid()).expect("a Unix socket")).await;
        let dialler = Dialler(Arc::new(prover(OURS, security(EncryptionChoice::Auto))));
        let link = dialler.dial(address, true, &link(EPOCH), Instant::now() + LATE).await.expect("a link");
        let address = rustix::net::getsockname(link.socket()).unwrap();
        assert_eq!(address.address_family(), rustix::net::AddressFamily::UNIX);
        assert_eq!(silent.read(&mut [0]).await.unwrap(), 0, "it is hung up on");
    });
}

#[test]
fn a_rank_that_looks_for_another_epoch_or_rank_is_refused() {
    let others = [link(Epoch(1)), LinkId::new(EPOCH, "world", Rank(1), Rank(2))];
    for (encryption, id) in BOTH.into_iter().flat_map(|encryption| others.map(|id| (encryption, id))) {
        refuses(encryption, &["epoch"], async |address| {
            let refused = dial(address, OURS, security(encryption), id).await.unwrap_err();
            assert!(matches!(refused, LinkError::Handshake(HandshakeError::Refused)), "{refused}");
        });
    }
}

#[test]
fn two_ranks_of_which_one_encrypts_are_both_told_which() {
    for (accepting, dialling) in
        [(EncryptionChoice::On, EncryptionChoice::Off), (EncryptionChoice::Off, EncryptionChoice::On)]
    {
        refuses(accepting, &["encryption"], async |address| {
            let refused = dial(address, OURS, security(dialling), link(EPOCH)).await.unwrap_err();
            let here = security(dialling).protection(address.ip());
            let there = security(accepting).protection(address.ip());
            assert!(
                matches!(refused, LinkError::Handshake(HandshakeError::Mismatch(m)) if m == Mismatch { here, there }),
                "{refused}"
            );
            assert!(refused.is_final());
            let words = refused.to_string();
            assert!(
                words.contains(&format!("this end {here}")) && words.contains("security.encryption"),
                "{words}"
            );
        });
    }
}

#[test]
fn somebody_in_between_who_decrypts_on_both_sides_is_refused() {
    refuses(EncryptionChoice::On, &["intercepted"], async |address| {
        let middle = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let victim = dial(middle.local_addr().unwrap(), OURS, security(EncryptionChoice::On), link(EPOCH));
        let intercept = async {
            let mut dialler = middle.accept().await.unwrap().0;
            let mut acceptor = TcpStream::connect(address).await.unwrap();
            pass_on_clear(&mut dialler, &mut acceptor).await;
            let own = security(EncryptionChoice::On);
            let (dialler, acceptor) = tokio::join!(
                own.accept(Protection::Encrypted, dialler),
                own.connect(Protection::Encrypted, acceptor)
            );
            let (mut dialler, mut acceptor) = (dialler.expect("TLS begins"), acceptor.expect("TLS begins"));
            let _ = copy_bidirectional(&mut dialler, &mut acceptor).await;
        };
        let (refused, ()) = tokio::join!(victim, intercept);
        let refused = refused.unwrap_err();
        let is_hung_up =
            matches!(refused, LinkError::Handshake(HandshakeError::Refused | HandshakeError::Io(_)));
        assert!(is_hung_up, "{refused}");
    });
}

#[test]
fn a_rank_that_encrypts_says_nothing_to_one_who_claims_that_nobody_does() {
    refuses(EncryptionChoice::On, &[], async |_| {
        let middle = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let victim = dial(middle.local_addr().unwrap(), OURS, security(EncryptionChoice::On), link(EPOCH));
        let downgrade = async {
            let mut dialler = middle.accept().await.unwrap().0;
            let mut heard = vec![0; OPENING];
            dialler.read_exact(&mut heard).await.unwrap();
            // Whatever it answers, it does not know the secret.
            dialler.write_all(&opening(Protection::Clear)).await.unwrap();
            dialler.write_all(&[5; PROOF]).await.unwrap();
            dialler.read_to_end(&mut heard).await.unwrap();
            heard
        };
        let (refused, heard) = tokio::join!(victim, downgrade);
        let refused = refused.unwrap_err();
        assert_strange(&refused);
        assert_eq!(heard.len(), OPENING, "what shows the setting, and no rank, group or epoch");
    });
}

fn assert_strange(refused: &LinkError) {
    let is_strange = matches!(refused, LinkError::Handshake(HandshakeError::WrongSecret));
    assert!(is_strange && !refused.is_final(), "{refused}");
}

#[test]
fn who_accepts_without_the_secret_gets_no_link() {
    refuses(EncryptionChoice::On, &[], async |_| {
        for encryption in BOTH {
            let impostor = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let at = impostor.local_addr().unwrap();
            let victim = dial(at, OURS, security(encryption), link(EPOCH));
            let accept = async {
                let mut stream = impostor.accept().await.unwrap().0;
                let protection = security(encryption).protection(at.ip());
                stream.read_exact(&mut [0; OPENING]).await.unwrap();
                stream.write_all(&[&opening(protection)[..], &[5; PROOF]].concat()).await.unwrap();
                // Waits until the other end closes the connection.
                let _ = stream.read(&mut [0]).await;
            };
            let (refused, ()) = tokio::join!(victim, accept);
            assert_strange(&refused.unwrap_err());
        }
    });
}

#[test]
fn an_outsider_who_takes_the_port_for_a_while_or_changes_a_byte_does_not_make_a_rank_give_up() {
    refuses(EncryptionChoice::On, &["secret", "tls"], async |address| {
        let middle = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let at = middle.local_addr().unwrap();
        let dialler = Dialler(Arc::new(prover(OURS, security(EncryptionChoice::On))));
        let id = link(EPOCH);
        let honest = dialler.dial(at, false, &id, Instant::now() + LATE);
        let trouble = async {
            let mut outsider = middle.accept().await.unwrap().0;
            outsider.write_all(&opening(Protection::Clear)).await.unwrap();
            drop(outsider);
            let (mut from, mut to) =
                (middle.accept().await.unwrap().0, TcpStream::connect(address).await.unwrap());
            pass(&mut from, &mut to, OPENING).await;
            let mut answer = [0; OPENING];
            to.read_exact(&mut answer).await.unwrap();
            // The byte of the protection.
            answer[7] ^= 1;
            from.write_all(&answer).await.unwrap();
            let _ = copy_bidirectional(&mut from, &mut to).await;
            // The first byte of TLS.
            let (mut from, mut to) =
                (middle.accept().await.unwrap().0, TcpStream::connect(address).await.unwrap());
            pass_on_clear(&mut from, &mut to).await;
            let first = from.read_u8().await.unwrap();
            to.write_u8(!first).await.unwrap();
            let _ = copy_bidirectional(&mut from, &mut to).await;
            let (mut from, mut to) =
                (middle.accept().await.unwrap().0, TcpStream::connect(address).await.unwrap());
            let _ = copy_bidirectional(&mut from, &mut to).await;
        };
        tokio::select! {
            reached = honest => drop(reached.expect("a link")),
            () = trouble => unreachable!("the link ends it"),
        }
    });
}
