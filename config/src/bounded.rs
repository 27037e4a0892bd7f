//! Numbers with bounds. A value out of bounds cannot be constructed.

use crate::duration::LONGEST;
use crate::setting::{Setting, public_setting};
use crate::{ByteSize, ValueError};
use std::time::Duration;

macro_rules! bounded {
    (
        $(#[$meta:meta])+
        $name:ident($kind:ty), $accepts:expr, $expected:literal, $example:literal
    ) => {
        $(#[$meta])+
        #[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
        pub struct $name($kind);

        impl $name {
            /// Creates a bounded number from `value`, if it is within the bounds.
            pub fn new(value: $kind) -> Result<Self, ValueError> {
                let accepts: fn($kind) -> bool = $accepts;
                if accepts(value) {
                    return Ok(Self(value));
                }
                Err(Self::refuse(format!("`{}`", value.show()), None))
            }

            /// Returns the number.
            pub const fn get(self) -> $kind {
                self.0
            }
        }

        impl Setting for $name {
            const EXPECTED: &'static str = $expected;
            const EXAMPLE: &'static str = $example;

            fn read(text: &str) -> Result<Self, Option<String>> {
                Self::new(<$kind as Setting>::read(text)?).map_err(|error| error.why)
            }

            fn show(&self) -> String {
                self.0.show()
            }
        }

        public_setting!($name);
    };
}

bounded! {
    /// The number of ranks of a job: 1 to 65536.
    #[derive(Eq, Ord, Hash)]
    WorldSize(u32), |ranks| (1..=65_536).contains(&ranks), "a whole number from 1 to 65536", "8"
}

bounded! {
    /// The maximum time to wait. It is never zero, which could mean "at once" or "for ever", and at most 365 days, so that adding
    /// it to the current time cannot overflow.
    #[derive(Eq, Ord, Hash)]
    Timeout(Duration), |wait| !wait.is_zero() && wait <= LONGEST,
    "a duration with its unit (ns, us, ms, s, m, h, d), more than zero and at most 365d", "30s"
}

impl Timeout {
    /// Creates a timeout of `seconds`.
    ///
    /// # Panics
    /// Panics if `seconds` is zero or more than 365 days.
    pub const fn from_secs(seconds: u64) -> Self {
        assert!(0 < seconds && seconds <= LONGEST.as_secs(), "a timeout is from 1s to 365d");
        Self(Duration::from_secs(seconds))
    }

    /// Creates a timeout of `milliseconds`.
    ///
    /// # Panics
    /// Panics if `milliseconds` is zero or more than 365 days.
    pub const fn from_millis(milliseconds: u64) -> Self {
        assert!(
            0 < milliseconds && milliseconds <= LONGEST.as_secs() * 1000,
            "a timeout is from 1ms to 365d"
        );
        Self(Duration::from_millis(milliseconds))
    }
}

bounded! {
    /// The sampling temperature. Zero always selects the most likely token.
    Temperature(f32), |temperature| (0.0..=f32::MAX).contains(&temperature), "a number, 0 or more", "0.7"
}

bounded! {
    /// The number of calls that a flight recorder keeps: 0 to 1048576.
    #[derive(Eq, Ord, Hash)]
    RecordedCalls(u32), |calls| calls <= 1 << 20, "a whole number from 0 to 1048576", "2048"
}

bounded! {
    /// The maximum size of a message: 16 KiB or more, because a rank that joins must fit.
    #[derive(Eq, Ord, Hash)]
    MessageSize(ByteSize), |size| size >= ByteSize::kib(16),
    "a size in bytes, or a number with a unit (KB, MB, GB, TB; KiB or K, MiB or M, GiB or G, TiB or T), at least 16KiB", "1MiB"
}

bounded! {
    /// A fraction: more than 0, at most 1.
    Fraction(f32), |part| part > 0.0 && part <= 1.0, "a number more than 0 and at most 1", "0.9"
}
