//! Values as text: one syntax for the file, the environment, flags and `ryz config show`.

use crate::ValueError;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::path::PathBuf;

/// A type of settings.
pub(crate) trait Setting: Sized {
    /// The accepted values. Completes the sentence "expected …".
    const EXPECTED: &'static str;
    /// An example of a valid value.
    const EXAMPLE: &'static str;
    /// True if the setting may be a table in the file, whose entries are read as lines `name=value`.
    const IS_TABLE: bool = false;

    /// Parses `text`. The error is an optional explanation in addition to "expected …".
    fn read(text: &str) -> Result<Self, Option<String>>;

    /// Returns the text that [`Setting::read`] parses to the same value.
    fn show(&self) -> String;

    fn parse(text: &str) -> Result<Self, ValueError> {
        Self::read(text).map_err(|why| {
            // The lines of a table stand in one.
            let shown = text.trim_end_matches('\n').replace('\n', " ");
            let found = if text.is_empty() { "nothing".into() } else { format!("`{shown}`") };
            Self::refuse(found, why)
        })
    }

    fn refuse(found: String, why: Option<String>) -> ValueError {
        ValueError { found, expected: Self::EXPECTED, example: Self::EXAMPLE, why }
    }
}

/// Parses a default that is written in this crate's source.
pub(crate) fn built_in<T: Setting>(text: &str) -> T {
    T::parse(text).unwrap_or_else(|error| unreachable!("a default of this crate: {error}"))
}

/// Empty text means unset, so that a stronger layer can undo a weaker one.
impl<T: Setting> Setting for Option<T> {
    const EXPECTED: &'static str = T::EXPECTED;
    const EXAMPLE: &'static str = T::EXAMPLE;

    fn read(text: &str) -> Result<Self, Option<String>> {
        if text.is_empty() { Ok(None) } else { T::read(text).map(Some) }
    }

    fn show(&self) -> String {
        self.as_ref().map(T::show).unwrap_or_default()
    }
}

macro_rules! from_str_settings {
    ($($kind:ty: $expected:literal, $example:literal;)+) => {$(
        impl Setting for $kind {
            const EXPECTED: &'static str = $expected;
            const EXAMPLE: &'static str = $example;

            fn read(text: &str) -> Result<Self, Option<String>> {
                text.trim().parse().map_err(|_| None)
            }

            fn show(&self) -> String {
                self.to_string()
            }
        }
    )+};
}

from_str_settings! {
    bool: "true or false", "true";
    u32: "a whole number from 0 to 4294967295", "4";
    u64: "a whole number from 0 to 18446744073709551615", "42";
    f32: "a number", "0.5";
    NonZeroU32: "a whole number from 1 to 4294967295", "4";
    IpAddr: "an IP address", "10.0.0.1";
    SocketAddr: "an IP address and a port", "127.0.0.1:9090";
}

impl Setting for String {
    const EXPECTED: &'static str = "text that is not empty";
    const EXAMPLE: &'static str = "ryzanstein";

    fn read(text: &str) -> Result<Self, Option<String>> {
        if text.trim().is_empty() { Err(None) } else { Ok(text.to_owned()) }
    }

    fn show(&self) -> String {
        self.clone()
    }
}

impl Setting for PathBuf {
    const EXPECTED: &'static str = "a path";
    const EXAMPLE: &'static str = "/var/log/ryzanstein";

    fn read(text: &str) -> Result<Self, Option<String>> {
        if text.is_empty() { Err(None) } else { Ok(text.into()) }
    }

    fn show(&self) -> String {
        self.to_string_lossy().into_owned()
    }
}

/// Implements `FromStr` and `Display` for a public type, by its [`Setting`].
macro_rules! public_setting {
    ($kind:ty) => {
        impl std::str::FromStr for $kind {
            type Err = $crate::ValueError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                $crate::setting::Setting::parse(text)
            }
        }

        impl std::fmt::Display for $kind {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(&$crate::setting::Setting::show(self))
            }
        }
    };
}
pub(crate) use public_setting;
