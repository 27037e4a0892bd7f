//! Buffers in the memory of a group's backend, for code that supports every backend; simultaneous messages in both directions.

use std::marker::PhantomData;

use super::ProcessGroup;
use super::inner::Buffers;
use super::memory::GroupMemory;
use crate::device::buffer::{Buffer, BufferMut, View, ViewMut};
use crate::error::Result;
use crate::types::dtype::Element;
use crate::types::operation::Operation;
use crate::types::rank::Rank;

/// Elements in the memory that a group's calls work on. Created by [`ProcessGroup::upload`].
#[derive(Debug)]
pub struct GroupBuffer<T: Element> {
    memory: GroupMemory,
    element: PhantomData<T>,
}

impl<T: Element> GroupBuffer<T> {
    /// Replaces all values; `values` has the length of the buffer.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the length differs, and errors of the GPU.
    pub fn write(&mut self, values: &[T]) -> Result<()> {
        self.memory.write(values)
    }
}

impl<T: Element> Buffer for GroupBuffer<T> {
    fn view(&self) -> View<'_> {
        self.memory.view()
    }
}

impl<T: Element> BufferMut for GroupBuffer<T> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        self.memory.view_mut()
    }
}

impl ProcessGroup {
    /// Copies values to the memory on which the calls of this group work.
    ///
    /// # Errors
    /// Errors of the GPU.
    pub fn upload<T: Element>(&self, values: &[T]) -> Result<GroupBuffer<T>> {
        Ok(GroupBuffer { memory: GroupMemory::from_slice(self.device(), values)?, element: PhantomData })
    }

    /// Copies the values back, once all earlier calls are done; see [`synchronize`](Self::synchronize).
    ///
    /// # Errors
    /// Those of [`synchronize`](Self::synchronize).
    pub fn download<T: Element>(&mut self, buffer: &GroupBuffer<T>) -> Result<Vec<T>> {
        if self.device().is_some() {
            self.synchronize()?;
        }
        buffer.memory.to_vec()
    }

    /// Sends one message and receives another at the same time. GPUs that exchange messages need it: there, a
    /// [`send`](Self::send) completes when its receiver takes it, so ranks that all send first deadlock.
    ///
    /// # Errors
    /// As [`send`](Self::send) and [`recv`](Self::recv).
    pub fn send_recv(
        &mut self,
        send: &(impl Buffer + ?Sized),
        to: Rank,
        receive: &mut (impl BufferMut + ?Sized),
        from: Rank,
    ) -> Result<()> {
        let (sent, received) = (send.view(), receive.view_mut());
        let (sending, receiving) = (Operation::Send { to }, Operation::Recv { from });
        // Both are checked before either gets a number: a rejected call would leave a gap.
        let (outgoing, incoming) =
            (self.message(sending, sent)?, self.message(receiving, received.as_view())?);
        let (send_number, receive_number) =
            (self.next_message(sending, to), self.next_message(receiving, from));
        self.wait_idle();
        self.inner.run_all(vec![
            (outgoing, send_number, Buffers::OutOfPlace(Some(sent), None)),
            (incoming, receive_number, Buffers::OutOfPlace(None, Some(received))),
        ])
    }
}
