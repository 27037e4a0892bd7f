//! Values as text: one syntax for the file, the environment, flags and `ryz config show`.

use crate::ValueError;
use serde::de::{self, Deserializer, Visitor};
use serde::ser::Serializer;
use std::fmt;
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

    /// Serializes the value as text. Numbers and booleans override this, so that JSON and TOML show them unquoted.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.show())
    }

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

    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Some(value) => value.serialize(serializer),
            None => serializer.serialize_none(),
        }
    }
}

macro_rules! from_str_settings {
    ($($kind:ty: $expected:literal, $example:literal $(, $serialize:ident as $bare:ty)?;)+) => {$(
        impl Setting for $kind {
            const EXPECTED: &'static str = $expected;
            const EXAMPLE: &'static str = $example;

            fn read(text: &str) -> Result<Self, Option<String>> {
                text.trim().parse().map_err(|_| None)
            }

            fn show(&self) -> String {
                self.to_string()
            }

            $(fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.$serialize(<$bare>::from(*self))
            })?
        }
    )+};
}

from_str_settings! {
    bool: "true or false", "true", serialize_bool as bool;
    u32: "a whole number from 0 to 4294967295", "4", serialize_u32 as u32;
    u64: "a whole number from 0 to 18446744073709551615", "42", serialize_u64 as u64;
    f32: "a number", "0.5", serialize_f32 as f32;
    NonZeroU32: "a whole number from 1 to 4294967295", "4", serialize_u32 as u32;
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

/// Serialization of a field as its setting, for `#[serde(with)]`.
pub(crate) mod as_setting {
    use super::{Deserializer, Serializer, Setting, TextVisitor, de};

    pub(crate) fn serialize<T: Setting, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        value.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, T: Setting, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
        T::parse(&deserializer.deserialize_any(TextVisitor(T::EXPECTED))?).map_err(de::Error::custom)
    }
}

/// Reads any scalar as the text that a user would write.
struct TextVisitor(&'static str);

impl<'de> Visitor<'de> for TextVisitor {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_bool<E>(self, value: bool) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_i64<E>(self, value: i64) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_u64<E>(self, value: u64) -> Result<String, E> {
        Ok(value.to_string())
    }

    // The only floating-point settings are f32. Shown as f64, 0.1 would have more digits.
    fn visit_f32<E>(self, value: f32) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_f64<E>(self, value: f64) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_str<E>(self, value: &str) -> Result<String, E> {
        Ok(value.to_owned())
    }

    fn visit_none<E>(self) -> Result<String, E> {
        Ok(String::new())
    }

    fn visit_unit<E>(self) -> Result<String, E> {
        Ok(String::new())
    }

    /// Reads a table as lines.
    fn visit_map<A: de::MapAccess<'de>>(self, mut table: A) -> Result<String, A::Error> {
        let mut lines = String::new();
        while let Some((name, value)) = table.next_entry::<String, String>()? {
            lines.extend([name.as_str(), "=", value.as_str(), "\n"]);
        }
        Ok(lines)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// Implements `FromStr`, `Display`, `Serialize` and `Deserialize` for a public type, by its [`Setting`].
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

        impl serde::Serialize for $kind {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                $crate::setting::Setting::serialize(self, serializer)
            }
        }

        impl<'de> serde::Deserialize<'de> for $kind {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::setting::as_setting::deserialize(deserializer)
            }
        }
    };
}
pub(crate) use public_setting;
