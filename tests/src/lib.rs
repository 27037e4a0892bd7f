//! Tests that need two ranks or more: conformance, faults, end to end.
