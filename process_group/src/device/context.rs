//! The driver's context of one GPU.

use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};

use super::budget::Budget;
use super::driver::Driver;
use super::error::DeviceError;
use super::symbols::foreign;

/// Makes a context's GPU current and calls a function of the driver: `driver_call!(context, cuEventRecord(event, stream))`. Gives a
/// `Result` whose error names the function. As with [`foreign!`], which must be in scope, the call is unsafe.
macro_rules! driver_call {
    ($context:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let context: &$crate::device::context::Context = &$context;
        context.bind().and_then(|()| {
            let code = foreign!(driver, context.driver.$function($($argument),*));
            context.check(stringify!($function).trim_end_matches("_v2"), code)
        })
    }};
}
pub(super) use driver_call;

/// The context of a GPU and the driver's functions, which everything on the GPU needs.
///
/// The context is cudarc's, which releases it with the last of its users. Calls of this crate use the driver's table: one call
/// makes the context current, where cudarc first queries it, and no error that cudarc has kept from a drop is returned instead of
/// their own.
pub(crate) struct Context {
    pub(crate) driver: Driver,
    pub(crate) ordinal: u32,
    cuda: Arc<CudaContext>,
    pub(super) budget: Budget,
}

impl Context {
    pub(super) fn new(driver: &Driver, ordinal: u32, cuda: Arc<CudaContext>, budget: Budget) -> Self {
        Self { driver: *driver, ordinal, cuda, budget }
    }

    /// Retains the primary context of a GPU.
    pub(super) fn primary(driver: &Driver, ordinal: u32) -> Result<Arc<CudaContext>, DeviceError> {
        CudaContext::new(ordinal as usize)
            .map_err(|error| driver.refused(ordinal, "cuDevicePrimaryCtxRetain", error))
    }

    /// Makes this GPU the current one of this thread. Every function that uses the GPU calls this first.
    pub(crate) fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained for as long as `self` lives.
        let code = unsafe { foreign!(driver, self.driver.cuCtxSetCurrent(self.handle())) };
        self.check("cuCtxSetCurrent", code)
    }

    /// Lets this thread query events while another thread captures a stream. An engine may capture in a mode in which a query
    /// otherwise ends the capture.
    pub(crate) fn ask_during_captures(&self) -> Result<(), DeviceError> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is to a live mode, which the call exchanges for this thread's.
        let code = unsafe { foreign!(driver, self.driver.cuThreadExchangeStreamCaptureMode(&raw mut mode)) };
        self.check("cuThreadExchangeStreamCaptureMode", code)
    }

    pub(super) fn cuda(&self) -> &Arc<CudaContext> {
        &self.cuda
    }

    pub(super) fn handle(&self) -> sys::CUcontext {
        self.cuda.cu_ctx()
    }

    /// Returns the driver's number of the GPU.
    pub(super) fn device(&self) -> sys::CUdevice {
        self.cuda.cu_device()
    }

    /// Returns the free bytes and all bytes. Both include other processes.
    pub(super) fn free_and_total(&self) -> Result<(u64, u64), DeviceError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to live integers, and a context is current.
        unsafe { driver_call!(self, cuMemGetInfo_v2(&raw mut free, &raw mut total)) }?;
        Ok((free as u64, total as u64))
    }

    pub(crate) fn check(&self, call: &'static str, code: i32) -> Result<(), DeviceError> {
        self.driver.check(self.ordinal, call, code)
    }

    /// Converts the result of a call of cudarc's objects.
    pub(super) fn took<T>(
        &self,
        call: &'static str,
        outcome: Result<T, cudarc::driver::DriverError>,
    ) -> Result<T, DeviceError> {
        outcome.map_err(|error| self.driver.refused(self.ordinal, call, error))
    }
}
