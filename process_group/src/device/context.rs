//! The driver's context of one GPU.

use super::budget::Budget;
use super::driver::Driver;
use super::error::DeviceError;
use super::symbols::Handle;

/// What everything on a GPU needs: its primary context, and the driver's functions.
pub(crate) struct Context {
    pub(crate) driver: Driver,
    pub(crate) ordinal: u32,
    handle: Handle,
    device: i32,
    pub(super) budget: Budget,
}

impl Context {
    /// Retains the primary context of a GPU.
    pub(super) fn retain(
        driver: &Driver,
        ordinal: u32,
        device: i32,
        budget: Budget,
    ) -> Result<Self, DeviceError> {
        let mut handle = 0;
        // SAFETY: the driver is initialised and has given the device; the pointer is to a live handle. Released when the
        // context is dropped.
        let code = unsafe { (driver.cuDevicePrimaryCtxRetain)(&raw mut handle, device) };
        driver.check(ordinal, "cuDevicePrimaryCtxRetain", code)?;
        Ok(Self { driver: *driver, ordinal, handle, device, budget })
    }

    /// Makes this GPU the current one of this thread. Every function that touches it calls this first.
    pub(crate) fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained for as long as `self` lives.
        let code = unsafe { (self.driver.cuCtxSetCurrent)(self.handle) };
        self.check("cuCtxSetCurrent", code)
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// The driver's number of the GPU.
    pub(super) fn device(&self) -> i32 {
        self.device
    }

    /// Bytes free and bytes in all, other processes counted.
    pub(super) fn free_and_total(&self) -> Result<(u64, u64), DeviceError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to live integers, and a context is current.
        let code = unsafe { (self.driver.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", code)?;
        Ok((free as u64, total as u64))
    }

    pub(crate) fn check(&self, call: &'static str, code: i32) -> Result<(), DeviceError> {
        self.driver.check(self.ordinal, call, code)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once when it was made; everything that uses it holds this value.
        let _ = unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}
