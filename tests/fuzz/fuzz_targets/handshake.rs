//! Both ends of the handshake of each protocol, against a peer without the secret that says anything.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ryzanstein_config::SecurityConfig;
use ryzanstein_process_group::security::{Handshake, Protection, Protocol, Security};
use ryzanstein_process_group::{AdmissionToken, Secret};
use tokio::io::{join, sink};

fuzz_target!(|bytes: &[u8]| {
    let secret = Secret::new([7; 32]);
    let security = Security::new(&SecurityConfig::default()).expect("the default settings");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        for protocol in [Protocol::Control, Protocol::Data] {
            let handshake = Handshake { protocol, secret: secret.clone(), security: security.clone() };
            for protection in [Protection::Clear, Protection::Encrypted] {
                let stream = join(bytes, sink());
                let accepted = handshake.accept::<_, 48>(stream, protection, &AdmissionToken::default()).await;
                assert!(!matches!(accepted, Ok(Some(_))), "a client without the secret is let in");
                let connected = handshake.connect(join(bytes, sink()), protection, &[3; 48]).await;
                assert!(connected.is_err(), "a server without the secret is believed");
            }
        }
    });
});
