//! Starts the ranks of a job, watches over them and ends them.
