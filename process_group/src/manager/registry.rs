//! The list of backends.

use ryzanstein_config::BackendChoice;

use crate::cpu;
use crate::factory::BackendFactory;
use crate::gpu::nccl;
use crate::types::backend_kind::BackendKind;

/// Returns the factories of the backends that a choice allows, the preferred one first.
pub(crate) fn factories(choice: BackendChoice) -> Vec<Box<dyn BackendFactory>> {
    let make = |kind: &BackendKind| -> Box<dyn BackendFactory> {
        match kind {
            BackendKind::Nccl => Box::new(nccl::Factory::default()),
            BackendKind::Tcp => Box::new(cpu::Factory),
        }
    };
    BackendKind::allowed_by(choice).iter().map(make).collect()
}
