//! Slices of cudarc as buffers.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop,
};

use super::tracked::{Tracked, TrackedMut};
use crate::device::buffer::{Buffer, BufferMut, View, ViewMut};
use crate::types::dtype::Element;

macro_rules! tracked {
    ($($slice:ty),*) => { $(
        impl<T: Element> Tracked for $slice {
            fn home(&self) -> &Arc<CudaStream> {
                DeviceSlice::stream(self)
            }

            fn bytes(&self) -> usize {
                DeviceSlice::num_bytes(self)
            }

            fn read_on<'s>(&'s self, stream: &'s CudaStream) -> (CUdeviceptr, SyncOnDrop<'s>) {
                self.device_ptr(stream)
            }
        }

        impl<T: Element> Buffer for $slice {
            fn view(&self) -> View<'_> {
                View::tracked(T::DTYPE, self)
            }
        }
    )* };
}

macro_rules! tracked_mut {
    ($($slice:ty),*) => { $(
        impl<T: Element> TrackedMut for $slice {
            fn write_on<'s>(&'s mut self, stream: &'s CudaStream) -> (CUdeviceptr, SyncOnDrop<'s>) {
                self.device_ptr_mut(stream)
            }
        }

        impl<T: Element> BufferMut for $slice {
            fn view_mut(&mut self) -> ViewMut<'_> {
                ViewMut::tracked(T::DTYPE, self)
            }
        }
    )* };
}

tracked!(CudaSlice<T>, CudaView<'_, T>, CudaViewMut<'_, T>);
tracked_mut!(CudaSlice<T>, CudaViewMut<'_, T>);
