//! Figures with units, as text and as numbers.

use std::time::Duration;

/// Writes bytes in powers of 1000, like the targets.
pub fn bytes(bytes: f64) -> String {
    match bytes {
        b if b >= 1e9 => format!("{} GB", short(b / 1e9)),
        b if b >= 1e6 => format!("{} MB", short(b / 1e6)),
        b if b >= 1e3 => format!("{} KB", short(b / 1e3)),
        b => format!("{b:.0} B"),
    }
}

/// Writes microseconds with a suitable unit.
pub fn time(us: f64) -> String {
    match us {
        u if u >= 1e6 => format!("{} s", short(u / 1e6)),
        u if u >= 1e3 => format!("{} ms", short(u / 1e3)),
        u => format!("{} us", short(u)),
    }
}

/// Returns a time in seconds, rounded down to milliseconds.
pub fn seconds(time: Duration) -> f64 {
    time.as_millis() as f64 / 1e3
}

fn short(value: f64) -> String {
    let text = if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") };
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits_at_most_and_no_empty_ones() {
        assert_eq!(bytes(100_000.0), "100 KB");
        assert_eq!(bytes(10_500_000.0), "10.5 MB");
        assert_eq!(bytes(7.0), "7 B");
        assert_eq!(time(500.0), "500 us");
        assert_eq!(time(9.512), "9.51 us");
        assert_eq!(time(75_157.9), "75.16 ms");
    }
}
