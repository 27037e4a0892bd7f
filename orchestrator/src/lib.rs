//! The processes of one job: rendezvous, launcher, engine facade, and the ryz command.
