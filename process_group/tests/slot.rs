//! The flight recorder's slot under loom: a reader beside the writer, in every interleaving and with every value that the
//! memory model lets a load return.

mod atomic {
    pub(crate) use loom::hint::spin_loop;
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};

    /// Fewer than the recorder makes: each try more multiplies the interleavings.
    pub(crate) const TRIES: usize = 2;
}

#[path = "../src/observe/recorder/slot.rs"]
mod slot;

use loom::sync::Arc;
use loom::thread;
use slot::{Slot, WORDS};

/// Words that differ between calls, and between the begin and the end of one.
fn words(call: u64, is_finished: bool) -> [u64; WORDS] {
    [call, 10 + call, 20 + call, 30 + call, if is_finished { 40 + call } else { 0 }, u64::from(is_finished)]
}

fn begin(slot: &Slot, call: u64) {
    let words = words(call, false);
    slot.write(4 * call + 1, &std::array::from_fn::<_, WORDS, _>(|index| (index, words[index])));
}

fn finish(slot: &Slot, call: u64) {
    slot.write(4 * call + 3, &[4, 5].map(|index| (index, words(call, true)[index])));
}

#[test]
fn a_reader_beside_the_writer_sees_whole_calls_only_in_every_interleaving() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let slot = Arc::new(Slot::default());
        begin(&slot, 0);
        let writer = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || {
                finish(&slot, 0);
                begin(&slot, 1);
            })
        };
        for call in [0, 1] {
            if let Some(seen) = slot.read(call) {
                assert!(seen == words(call, false) || seen == words(call, true), "torn: {seen:?}");
            }
        }
        writer.join().unwrap();
        assert_eq!(slot.read(1), Some(words(1, false)));
        assert_eq!((slot.read(0), slot.word(0)), (None, 1));
    });
}
