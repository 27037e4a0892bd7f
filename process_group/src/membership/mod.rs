//! The members of a job: the roster, the layout of its ranks, the backend that all of them can use, and the store that they share.
//! Processes find each other outside this module, behind the trait [`Rendezvous`](rendezvous::Rendezvous).

pub(crate) mod capability;
pub(crate) mod half_open;
pub(crate) mod layout;
pub(crate) mod rendezvous;
pub(crate) mod roster;
pub(crate) mod select;
pub mod store;
