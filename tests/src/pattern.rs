//! Long vectors that are cheap to make and to compare: one period of values, repeated.

use std::fmt;

use crate::Small;

/// Elements of a period. Prime, so that it fits no chunk, segment or packet.
const PERIOD: usize = 4099;

/// An endless vector.
#[derive(Clone, Debug)]
pub struct Pattern<T>(Vec<T>);

impl<T: Small> Pattern<T> {
    /// The vector whose element `i` is `f(i)` in the first period. Values are below 256.
    pub fn new(f: impl Fn(usize) -> u32) -> Self {
        Self((0..PERIOD).map(|i| T::small(f(i))).collect())
    }

    /// Makes `into` what the endless vector holds from element `from` on.
    pub fn fill(&self, from: usize, into: &mut [T]) {
        self.pieces(from, into.len(), |at, piece| into[at..at + piece.len()].copy_from_slice(piece));
    }

    /// Compares all bits of `got` with what the endless vector holds from element `from` on.
    ///
    /// # Panics
    /// At the first element that differs, naming it and `what` it is of.
    #[track_caller]
    pub fn check(&self, from: usize, got: &[T], what: fmt::Arguments<'_>) {
        self.pieces(from, got.len(), |at, piece| {
            let part = &got[at..at + piece.len()];
            if bytemuck::cast_slice::<T, u8>(part) != bytemuck::cast_slice::<T, u8>(piece) {
                let bits = |x: &T| bytemuck::bytes_of(x).to_vec();
                let i = part.iter().zip(piece).position(|(a, b)| bits(a) != bits(b)).expect("bytes differ");
                panic!("{what}: element {} of {} is {:?}, not {:?}", at + i, got.len(), part[i], piece[i]);
            }
        });
    }

    fn pieces(&self, from: usize, length: usize, mut each: impl FnMut(usize, &[T])) {
        let mut at = 0;
        while at < length {
            let start = (from + at) % PERIOD;
            let piece = (PERIOD - start).min(length - at);
            each(at, &self.0[start..start + piece]);
            at += piece;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_finds_one_wrong_element_anywhere_and_nothing_in_itself() {
        let pattern = Pattern::<u8>::new(|i| (i % 251) as u32);
        let mut x = vec![0; 3 * PERIOD + 17];
        pattern.fill(5, &mut x);
        pattern.check(5, &x, format_args!("itself"));
        assert_eq!(x[..3], [5, 6, 7]);
        for at in [0, PERIOD - 6, PERIOD - 5, x.len() - 1] {
            let mut wrong = x.clone();
            wrong[at] ^= 1;
            let found = std::panic::catch_unwind(|| pattern.check(5, &wrong, format_args!("wrong")));
            let said = *found.expect_err("it differs").downcast::<String>().expect("a text");
            assert!(said.contains(&format!("element {at} of")), "{said}");
        }
    }
}
