//! The backends that a rank can use, as it reports them to the other ranks before one backend is selected.

use serde::{Deserialize, Serialize};

use crate::types::backend_kind::BackendKind;

/// One rank's ability to use one backend, and the requirements.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Capability {
    /// The backend.
    pub backend: BackendKind,
    /// The reason why it cannot be used; `None` if it can.
    pub obstacle: Option<String>,
    /// The reason in a few words, for readers of this rank's output. Other ranks do not get it.
    #[serde(skip)]
    pub summary: Option<&'static str>,
    /// The resource that the rank would use, which no other rank of the job may use.
    pub exclusive: Option<Exclusive>,
    /// The component that must have the same version on all ranks.
    pub version: Option<ComponentVersion>,
}

impl Capability {
    /// Creates a capability of a usable backend.
    pub const fn usable(backend: BackendKind) -> Self {
        Self { backend, obstacle: None, summary: None, exclusive: None, version: None }
    }

    /// Creates a capability of a backend that cannot be used, for this reason, of which `summary` is a short form.
    pub fn unusable(backend: BackendKind, summary: &'static str, reason: impl Into<String>) -> Self {
        Self { obstacle: Some(reason.into()), summary: Some(summary), ..Self::usable(backend) }
    }
}

/// A resource that only one rank can use at a time, such as a GPU.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Exclusive {
    /// Its unique identity.
    pub id: String,
    /// Its usual name, which follows "would share".
    pub name: String,
    /// The reason why it cannot be shared, and the remedy.
    pub rule: String,
}

/// The version of a component that must be the same on all ranks, such as a library.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ComponentVersion {
    /// The component.
    pub component: String,
    /// Its version.
    pub version: String,
    /// The reason why versions must not differ, and the remedy.
    pub rule: String,
}
