//! The streams that this thread captures.

use std::cell::RefCell;

use cudarc::driver::sys;

thread_local! {
    /// The streams that this thread captures, each with its replacement.
    static CAPTURED: RefCell<Vec<(Own, sys::CUstream)>> = const { RefCell::new(Vec::new()) };
}

/// A stream in CUDA's terms: each context has a default stream, and all default streams have the same handle.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Own {
    pub(super) context: sys::CUcontext,
    pub(super) stream: sys::CUstream,
}

/// Returns the stream on which this thread enqueues work for `own`.
pub(super) fn current(own: Own) -> sys::CUstream {
    // Once its thread-local storage is destroyed, a thread captures nothing.
    let place = CAPTURED
        .try_with(|captured| captured.borrow().iter().find(|(of, _)| *of == own).map(|(_, place)| *place));
    place.ok().flatten().unwrap_or(own.stream)
}

/// Makes this thread enqueue work for `of` on `place`.
pub(super) fn begin(of: Own, place: sys::CUstream) {
    CAPTURED.with_borrow_mut(|captured| captured.push((of, place)));
}

/// Ends the replacement.
pub(super) fn end(of: Own) {
    CAPTURED.with_borrow_mut(|captured| captured.retain(|(captured, _)| *captured != of));
}

#[cfg(test)]
mod tests {
    use std::ptr::without_provenance_mut as handle;

    use super::*;

    #[test]
    fn a_capture_replaces_one_stream_of_one_context_on_one_thread() {
        let own = |context, stream| Own { context: handle(context), stream: handle(stream) };
        begin(own(1, 0), handle(7));
        assert_eq!(current(own(1, 0)), handle(7));
        assert_eq!(current(own(2, 0)), handle(0), "the default stream of another context");
        assert_eq!(current(own(1, 5)), handle(5));
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(current(own(1, 0)), handle(0)));
        });
        end(own(1, 0));
        assert_eq!(current(own(1, 0)), handle(0));
    }
}
