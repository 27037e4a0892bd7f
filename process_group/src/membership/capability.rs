//! What a rank can use, as it tells the others before one backend is selected.

use serde::{Deserialize, Serialize};

use crate::types::backend_kind::BackendKind;

/// Whether one rank can use one backend, and what that takes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Capability {
    /// Which backend.
    pub backend: BackendKind,
    /// `None` when it can be used, else the reason.
    pub obstacle: Option<String>,
    /// The reason in a few words, for people who see this rank's output. Other ranks are not told.
    #[serde(skip)]
    pub summary: Option<&'static str>,
    /// What the rank would use, which no other rank of the job may use.
    pub exclusive: Option<Exclusive>,
    /// What must be of one version on all ranks.
    pub version: Option<ComponentVersion>,
}

impl Capability {
    /// It can be used.
    pub const fn usable(backend: BackendKind) -> Self {
        Self { backend, obstacle: None, summary: None, exclusive: None, version: None }
    }

    /// It cannot be used, for this reason, which `summary` puts in a few words.
    pub fn unusable(backend: BackendKind, summary: &'static str, reason: impl Into<String>) -> Self {
        Self { obstacle: Some(reason.into()), summary: Some(summary), ..Self::usable(backend) }
    }
}

/// Something that only one rank can use at a time, such as a GPU.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Exclusive {
    /// Its identity: no two things have the same.
    pub id: String,
    /// What people call it, behind "would share".
    pub name: String,
    /// Why it cannot be shared, and what to do about it.
    pub rule: String,
}

/// The version of something that must be the same on all ranks, such as a library.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ComponentVersion {
    /// What it is.
    pub component: String,
    /// Its version.
    pub version: String,
    /// Why versions must not differ, and what to do about it.
    pub rule: String,
}
