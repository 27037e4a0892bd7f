//! Observation of groups: the profile, the flight recorder, and the documented targets.

pub(crate) mod activity;
pub(crate) mod call_history;
pub(crate) mod flight_recorder;
pub(crate) mod profile;
pub(crate) mod record;
pub mod targets;
