//! Calls that are captured into a CUDA graph and repeated with it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Weak};

use super::ProcessGroup;
use super::inner::GroupInner;
use crate::error::{Error, Result};
use crate::stream::StreamCapture;

/// The calls of a group that were captured into a graph.
#[derive(Debug)]
pub struct CapturedCalls {
    group: Weak<GroupInner>,
    /// Number of its collectives; messages between two ranks are numbered separately.
    collectives: u64,
    captured: Option<Arc<StreamCapture>>,
}

impl ProcessGroup {
    /// Chooses whether graphs that are captured from now on time some of their calls, as `profile.graphs` does at the start. Each
    /// timed call makes a replay longer. Returns the choice before.
    pub fn set_graph_timing(&mut self, is_timed: bool) -> bool {
        std::mem::replace(&mut self.info.times_graphs, is_timed)
    }

    /// Records the calls that `work` makes while it captures them into a graph, so that [`replay`](Self::replay) can repeat them.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn capture<E>(&mut self, work: impl FnOnce(&mut Self) -> Result<(), E>) -> Result<CapturedCalls, E> {
        self.inner.begin_capture(self.info.times_graphs);
        let outcome = catch_unwind(AssertUnwindSafe(|| work(self)));
        let captured = self.inner.end_capture();
        let group = Arc::downgrade(&self.inner);
        let collectives = captured.as_ref().map_or(0, |captured| captured.calls().collectives().len() as u64);
        // They count when they are repeated.
        self.collectives -= collectives;
        let outcome = outcome.unwrap_or_else(|panic| resume_unwind(panic));
        outcome.map(|()| CapturedCalls { group, collectives, captured })
    }

    /// Repeats captured calls with `launch`, which launches their graph on the device's stream. They are counted, have the group's
    /// deadline, and appear in the profile like single calls, with times if the graph has [them](Self::set_graph_timing). The other
    /// ranks must do the same, or make the calls one by one.
    ///
    /// # Errors
    /// [`Error::Invalid`] when another group captured them, [`Error::Poisoned`] once the group has failed; those of `launch`.
    pub fn replay<E: From<Error>>(
        &mut self,
        calls: &CapturedCalls,
        launch: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        if !Weak::ptr_eq(&calls.group, &Arc::downgrade(&self.inner)) {
            let what = format!(
                "calls that another group captured were to be repeated in group `{}`: their graph leads to the communicator \
                 of the group it was captured with; capture it again with this one",
                self.info.name
            );
            return Err(Error::invalid(what).into());
        }
        let last = self.collectives + calls.collectives;
        self.inner.replay(calls.captured.as_ref(), last, launch)?;
        self.collectives = last;
        Ok(())
    }
}
