//! Both ends of the handshake with a rendezvous, against a stranger who says anything.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ryzanstein_config::SecurityConfig;
use ryzanstein_orchestrator::rendezvous::handshake;
use ryzanstein_process_group::security::{Protection, Security};
use ryzanstein_process_group::{Seat, Secret};
use tokio::io::{join, sink};

fuzz_target!(|bytes: &[u8]| {
    let secret = Secret::new([7; 32]);
    let security = Security::new(&SecurityConfig::default()).expect("settings");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let (mut client, mut server) = (join(bytes, sink()), join(bytes, sink()));
        let accepted =
            handshake::accept(&mut client, &secret, &security, Protection::Clear, &Seat::default());
        assert!(accepted.await.is_err(), "a stranger is let in");
        let connected = handshake::connect(&mut server, &secret, &security, Protection::Clear);
        assert!(connected.await.is_err(), "a stranger is believed");
    });
});
