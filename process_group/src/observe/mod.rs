//! Observation of groups. The [`profile`](profile::Profile) of a group records its calls: all by class, and the newest ones each. The
//! [flight recorder](flight_recorder::FlightRecorder) of a rank shows and writes the newest calls of all its groups.

pub(crate) mod activity;
pub(crate) mod call_history;
pub(crate) mod flight_recorder;
pub(crate) mod profile;
pub(crate) mod record;
pub mod targets;
