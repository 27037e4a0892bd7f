//! What a Ryzanstein user may set, and where each value came from.
