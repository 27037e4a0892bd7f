//! Both ends of the handshake with a rendezvous, against a stranger who says anything.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ryzanstein_orchestrator::rendezvous::handshake;
use ryzanstein_process_group::Secret;
use tokio::io::{join, sink};

fuzz_target!(|bytes: &[u8]| {
    let secret = Secret::new([7; 32]);
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        assert!(handshake::accept(&mut join(bytes, sink()), &secret).await.is_err(), "a stranger is let in");
        assert!(
            handshake::connect(&mut join(bytes, sink()), &secret).await.is_err(),
            "a stranger is believed"
        );
    });
});
