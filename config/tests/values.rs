//! Durations, sizes and addresses, as they are written and shown.

use proptest::prelude::*;
use ryzanstein_config::{
    BackendChoice, ByteSize, EncryptionChoice, Fraction, HostPort, LauncherChoice, LogFormat, ModelDType,
    Temperature, Timeout, TuningChoice, WorldSize,
};
use std::str::FromStr;
use std::time::Duration;

const LONGEST: u64 = 365 * 24 * 60 * 60;

#[test]
fn durations_are_read_with_their_units() {
    for (text, duration) in [
        ("30s", Duration::from_secs(30)),
        ("250ms", Duration::from_millis(250)),
        ("5m", Duration::from_secs(300)),
        ("1h30m", Duration::from_secs(5400)),
        ("1h 30m", Duration::from_secs(5400)),
        ("50us", Duration::from_micros(50)),
        ("50µs", Duration::from_micros(50)),
        ("1.5s", Duration::from_millis(1500)),
        ("365d", Duration::from_secs(LONGEST)),
    ] {
        assert_eq!(text.parse::<Timeout>().map(Timeout::get), Ok(duration), "{text}");
    }
}

#[test]
fn what_may_be_misread_is_no_duration() {
    for text in [
        "",
        "30",
        "1.5",
        "-3s",
        "5M",
        "2months",
        "366d",
        "1h30",
        "s",
        "1000000000000000000000s",
        "0",
        "0s",
        "0ms",
    ] {
        assert!(text.parse::<Timeout>().is_err(), "{text}");
    }
}

#[test]
fn sizes_are_read_with_their_units() {
    for (text, bytes) in [
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        ("100KB", 100_000),
        ("1 MiB", 1 << 20),
        ("25MB", 25_000_000),
        ("2GiB", 2 << 30),
        ("3GB", 3_000_000_000),
    ] {
        assert_eq!(text.parse(), Ok(ByteSize::bytes(bytes)), "{text}");
    }
}

#[test]
fn what_may_be_misread_is_no_size() {
    for text in
        ["", "MiB", "-1", "1.5MiB", "25mb", "1Mb", "1Ki", "1 2", "18446744073709551616", "99999999999TiB"]
    {
        assert!(text.parse::<ByteSize>().is_err(), "{text}");
    }
}

#[test]
fn a_size_is_shown_in_the_largest_unit_that_divides_it() {
    for (bytes, text) in
        [(0, "0B"), (1 << 20, "1MiB"), (1000, "1KB"), (1025, "1025B"), (1_000_000_000_000, "1TB")]
    {
        assert_eq!(ByteSize::bytes(bytes).to_string(), text);
    }
}

#[test]
fn an_address_has_a_host_and_a_port() {
    for (text, host, port) in [
        ("node0:29500", "node0", 29500),
        ("a-1.b.example:1", "a-1.b.example", 1),
        ("10.0.0.1:0", "10.0.0.1", 0),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
    ] {
        let address: HostPort = text.parse().unwrap();
        assert_eq!((address.host(), address.port()), (host, port));
        assert_eq!(address.to_string(), text);
    }
}

#[test]
fn what_is_no_host_and_port_is_no_address() {
    for text in [
        "",
        ":1",
        "node0",
        "node0:",
        "node0:65536",
        "node0:-1",
        "::1",
        "::1:x",
        "[::1]",
        "[node0]:1",
        "tcp://a:1",
        "a b:1",
        "a/b:1",
    ] {
        assert!(text.parse::<HostPort>().is_err(), "{text}");
    }
    assert!(HostPort::new("[::1]", 1).is_err());
}

#[test]
fn bounds_hold_however_a_value_is_made() {
    assert!(WorldSize::new(0).is_err() && WorldSize::new(65_537).is_err() && WorldSize::new(65_536).is_ok());
    assert!(Temperature::new(-0.1).is_err() && Temperature::new(f32::INFINITY).is_err());
    assert!(Fraction::new(1.1).is_err() && Fraction::new(f32::NAN).is_err() && Fraction::new(1.0).is_ok());
    assert!(Timeout::new(Duration::ZERO).is_err() && Timeout::new(Duration::MAX).is_err());
    assert_eq!(
        Fraction::new(2.0).unwrap_err().to_string(),
        "expected a number more than 0 and at most 1, such as `0.9`, not `2`"
    );
}

#[test]
fn every_choice_is_read_by_its_own_name() {
    fn check<T: Copy + FromStr + ToString + PartialEq + std::fmt::Debug>(all: &[T]) {
        for choice in all {
            assert_eq!(choice.to_string().parse().ok(), Some(*choice));
        }
    }
    check(BackendChoice::ALL);
    check(EncryptionChoice::ALL);
    check(LauncherChoice::ALL);
    check(LogFormat::ALL);
    check(ModelDType::ALL);
    assert_eq!("gloo".parse(), Ok(BackendChoice::Tcp));
}

proptest! {
    #[test]
    fn every_size_reads_back(bytes: u64, zeros in 0u32..50) {
        let size = ByteSize::bytes(bytes >> zeros << zeros);
        prop_assert_eq!(size.to_string().parse(), Ok(size));
    }

    #[test]
    fn every_duration_reads_back(seconds in 0..LONGEST, nanoseconds in 0u32..1_000_000_000, coarse in 0usize..4) {
        let grain = [1, 1_000, 1_000_000, 1_000_000_000][coarse];
        let duration = Duration::new(seconds, nanoseconds / grain * grain);
        prop_assume!(!duration.is_zero());
        let timeout = Timeout::new(duration).unwrap();
        prop_assert_eq!(timeout.to_string().parse(), Ok(timeout));
    }

    #[test]
    fn every_probability_and_temperature_reads_back(value in 1e-30f32..=1.0) {
        prop_assert_eq!(Fraction::new(value).unwrap().to_string().parse(), Fraction::new(value));
        let temperature = Temperature::new(value * 100.0).unwrap();
        prop_assert_eq!(temperature.to_string().parse(), Ok(temperature));
    }

    #[test]
    fn no_text_makes_a_parser_panic(text in "\\PC{0,24}") {
        let _ = (text.parse::<Timeout>(), text.parse::<ByteSize>(), text.parse::<HostPort>());
        let _ = (text.parse::<BackendChoice>(), text.parse::<Temperature>());
    }

    #[test]
    fn no_number_with_units_makes_a_parser_panic(
        text in "[0-9.]{0,22} ?(ns|us|ms|s|m|h|d|KB|MiB|TiB)[0-9:.]{0,6}(s|m)?",
    ) {
        let _ = (text.parse::<Timeout>(), text.parse::<ByteSize>(), text.parse::<HostPort>());
    }
}

#[test]
fn a_table_of_paths_is_named_by_a_word_or_by_its_file() {
    let read = |text: &str| text.parse::<TuningChoice>();
    assert_eq!((read("auto"), read("off")), (Ok(TuningChoice::Auto), Ok(TuningChoice::Off)));
    assert_eq!(read("here/paths.json"), Ok(TuningChoice::File("here/paths.json".into())));
    assert_eq!(read("here/paths.json").map(|choice| choice.to_string()), Ok("here/paths.json".into()));
    assert!(read(" ").is_err());
}
