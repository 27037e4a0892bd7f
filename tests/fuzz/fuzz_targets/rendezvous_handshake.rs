//! Both ends of the handshake with a rendezvous, against a peer without the secret that says anything.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ryzanstein_config::SecurityConfig;
use ryzanstein_orchestrator::rendezvous::handshake;
use ryzanstein_process_group::security::{Protection, Security};
use ryzanstein_process_group::{AdmissionToken, Secret};
use tokio::io::{join, sink};

fuzz_target!(|bytes: &[u8]| {
    let secret = Secret::new([7; 32]);
    let security = Security::new(&SecurityConfig::default()).expect("the default settings");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        for protection in [Protection::Clear, Protection::Encrypted] {
            let accepted =
                handshake::accept(join(bytes, sink()), &secret, &security, protection, &AdmissionToken::default())
                    .await;
            assert!(accepted.is_err(), "a client without the secret is let in");
            let connected = handshake::connect(join(bytes, sink()), &secret, &security, protection).await;
            assert!(connected.is_err(), "a server without the secret is believed");
        }
    });
});
