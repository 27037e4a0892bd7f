//! Observation of groups: the profile, the flight recorder, and the documented targets.

pub(crate) mod profile;
pub(crate) mod recorder;
pub mod targets;
