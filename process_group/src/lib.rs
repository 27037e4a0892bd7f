//! Ranks that call collectives on buffers: process groups, backends, schedules.
