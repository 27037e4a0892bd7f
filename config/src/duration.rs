//! Durations as users write them: `30s`, `250ms`, `1h30m`.

use crate::setting::Setting;
use std::time::Duration;

/// The longest duration: longer than any job, and short enough that adding it to the current time cannot overflow.
pub(crate) const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The accepted units, a subset of humantime's. humantime's `M` is a month, which a user does not mean by `5M`.
const UNITS: [&str; 8] = ["ns", "us", "µs", "ms", "s", "m", "h", "d"];

impl Setting for Duration {
    const EXPECTED: &'static str = "a duration with its unit (ns, us, ms, s, m, h, d), at most 365d";
    const EXAMPLE: &'static str = "30s";

    fn read(text: &str) -> Result<Self, Option<String>> {
        let text = text.trim();
        // Zero is the same in every unit.
        if text == "0" {
            return Ok(Duration::ZERO);
        }
        if !text.is_empty() && text.chars().all(|c| c.is_ascii_digit() || c == '.') {
            return Err(Some(format!(
                "the unit is missing: write `{text}s` for seconds or `{text}ms` for milliseconds"
            )));
        }
        let units = text.split(|c: char| !c.is_alphabetic()).filter(|unit| !unit.is_empty());
        if let Some(unit) = units.into_iter().find(|unit| !UNITS.contains(unit)) {
            return Err(Some(format!("`{unit}` is not a unit of time")));
        }
        let duration = humantime::parse_duration(text).map_err(|_| None)?;
        if duration > LONGEST { Err(Some("too long".into())) } else { Ok(duration) }
    }

    fn show(&self) -> String {
        // humantime writes `1h 30m`, and months for more than thirty days, which this parser rejects.
        if self.as_secs() >= 24 * 60 * 60 {
            let rest = Duration::new(self.as_secs() % (24 * 60 * 60), self.subsec_nanos());
            let days = format!("{}d", self.as_secs() / (24 * 60 * 60));
            return if rest.is_zero() { days } else { days + &rest.show() };
        }
        humantime::format_duration(*self).to_string().replace(' ', "")
    }
}
