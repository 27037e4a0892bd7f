//! Sizes in bytes: `25MiB`, `100KB`, `4096`.

use crate::setting::{Setting, public_setting};

/// A number of bytes, written with a unit: `KB MB GB TB` are powers of 1000, `KiB MiB GiB TiB` powers of 1024, and so are `K M G T`,
/// as in nccl-tests; `B` or no unit means bytes.
///
/// ```
/// use ryzanstein_config::ByteSize;
///
/// assert_eq!("25MiB".parse(), Ok(ByteSize::mib(25)));
/// assert_eq!("100KB".parse(), Ok(ByteSize::bytes(100_000)));
/// assert_eq!(ByteSize::bytes(1 << 20).to_string(), "1MiB");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(u64);

/// Units in descending order, so that the first unit that divides a size gives the shortest text.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("KB", 1_000),
    ("B", 1),
];

impl ByteSize {
    /// Creates a size in bytes.
    pub const fn bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Creates a size in KiB, 1024 bytes.
    pub const fn kib(kib: u32) -> Self {
        Self((kib as u64) << 10)
    }

    /// Creates a size in MiB, 1024 × 1024 bytes.
    pub const fn mib(mib: u32) -> Self {
        Self((mib as u64) << 20)
    }

    /// Returns the number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the number of bytes as a length in memory, or `usize::MAX` if it does not fit.
    pub fn as_usize(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl Setting for ByteSize {
    const EXPECTED: &'static str =
        "a size in bytes, or a number with a unit (KB, MB, GB, TB; KiB or K, MiB or M, GiB or G, TiB or T)";
    const EXAMPLE: &'static str = "25MiB";

    fn read(text: &str) -> Result<Self, Option<String>> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit = unit.trim();
        if number.is_empty() || unit.starts_with('.') {
            return Err(None);
        }
        let unit_name = match unit {
            "" => "B",
            "K" | "k" => "KiB",
            "M" | "m" => "MiB",
            "G" | "g" => "GiB",
            "T" | "t" => "TiB",
            unit => unit,
        };
        let known = UNITS.iter().find(|(name, _)| *name == unit_name);
        let (_, factor) = known.ok_or_else(|| Some(format!("`{unit}` is not a unit of size")))?;
        let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(*factor));
        bytes.map(Self).ok_or_else(|| Some("more bytes than 64 bits count".into()))
    }

    fn show(&self) -> String {
        let (unit, factor) = UNITS
            .iter()
            .find(|(_, factor)| self.0 > 0 && self.0.is_multiple_of(*factor))
            .unwrap_or(&("B", 1));
        format!("{}{unit}", self.0 / factor)
    }
}

public_setting!(ByteSize);
