//! The measurements and the changes, for people and for programs.

use std::fmt::Write as _;

use ryzanstein_process_group::paths::tuned::TunedRange;
use ryzanstein_process_group::units;
use serde_json::{Value, json};

use super::crossover::{Timed, Turn};
use super::measure::{Sizes, Tuned};
use ryzanstein_orchestrator::table::{Cell, Column, Screen, Tone, table as layout, wrap};

/// Formats the measurements as tables, then the lines that the table of paths gains and loses. `old` are its lines so far.
pub fn table(tuned: &Tuned, old: &[TunedRange], screen: Screen) -> String {
    let measured = all(tuned, |sizes| &sizes.sizes).map(|(name, timed)| measured_row(name, timed));
    let columns = [
        Column::left("operation"),
        Column::right("bytes"),
        Column::left("built in"),
        Column::right("median"),
        Column::right("quickest"),
    ];
    let mut text = format!(
        "Every path on its own, medians of rounds:\n{}\n",
        layout(&columns, &measured.collect::<Vec<_>>(), screen)
    );
    let turns: Vec<Vec<Cell>> =
        all(tuned, |sizes| &sizes.turns).map(|(name, turn)| turn_row(name, turn)).collect();
    if turns.is_empty() {
        text += "No path is clearly quicker than the built-in one.\n";
    } else {
        let columns = [
            Column::left("operation"),
            Column::right("bytes"),
            Column::left("tuned"),
            Column::right("gain"),
            Column::left("verdict"),
        ];
        let _ = write!(text, "Untuned and tuned in turn:\n{}", layout(&columns, &turns, screen));
    }
    text += "\n";
    let is_same = |a: &TunedRange, b: &TunedRange| {
        (&a.operation, a.from_bytes, a.to_bytes, a.path) == (&b.operation, b.from_bytes, b.to_bytes, b.path)
    };
    let line = |mark: char, range: &TunedRange| {
        let sizes = format!("{} to {} bytes", range.from_bytes, range.to_bytes);
        let what = format!("{mark} {} of {sizes}: {} ({})", range.operation, range.path, range.measured);
        wrap(&what, 4, screen) + "\n"
    };
    for range in old.iter().filter(|old| !tuned.ranges.iter().any(|new| is_same(old, new))) {
        text += &line('-', range);
    }
    for range in &tuned.ranges {
        text += &line(if old.iter().any(|old| is_same(old, range)) { ' ' } else { '+' }, range);
    }
    text
}

/// Returns each part of each operation, with the operation's name.
fn all<'a, T: 'a>(
    tuned: &'a Tuned,
    parts: impl Fn(&'a Sizes) -> &'a Vec<T> + Copy,
) -> impl Iterator<Item = (&'static str, &'a T)> {
    tuned.operations.iter().flat_map(move |sizes| parts(sizes).iter().map(|part| (sizes.what.name(), part)))
}

fn measured_row(name: &'static str, timed: &Timed) -> Vec<Cell> {
    let time = |us: Option<f64>| us.map_or_else(|| "-".into(), |us| Cell::from(units::time(us)));
    let quickest = timed.quickest();
    vec![
        name.into(),
        units::bytes(timed.bytes as f64).into(),
        timed.built_in.to_string().into(),
        time(timed.on(timed.built_in).map(|times| times.median_us)),
        time(quickest.map(|(_, times)| times.median_us)),
    ]
}

fn turn_row(name: &'static str, turn: &Turn) -> Vec<Cell> {
    let verdict = if turn.is_confirmed() {
        Cell::new("taken", Tone::Good)
    } else {
        Cell::new("not confirmed", Tone::Faint)
    };
    vec![
        name.into(),
        units::bytes(turn.bytes as f64).into(),
        turn.path.to_string().into(),
        format!("{:.2}", turn.ratio()).into(),
        verdict,
    ]
}

/// Returns the same as one object of JSON; `file` is the path of the written table.
pub fn json(tuned: &Tuned, file: Option<&str>) -> Value {
    let measured = all(tuned, |sizes| &sizes.sizes).map(|(name, timed)| {
        let paths = timed.paths.iter().map(|(path, times)| {
            json!({ "path": path.to_string(), "median_us": times.median_us, "p25_us": times.p25_us, "p75_us": times.p75_us,
                    "rounds": times.calls })
        });
        let paths: Vec<Value> = paths.collect();
        json!({ "operation": name, "bytes": timed.bytes, "built_in": timed.built_in.to_string(), "paths": paths })
    });
    let turns = all(tuned, |sizes| &sizes.turns).map(|(name, turn)| {
        json!({ "operation": name, "bytes": turn.bytes, "untuned": turn.built_in.to_string(),
                "untuned_us": turn.untuned.median_us, "tuned": turn.path.to_string(), "tuned_us": turn.tuned.median_us,
                "gain": turn.ratio(), "taken": turn.is_confirmed() })
    });
    let (measured, turns): (Vec<Value>, Vec<Value>) = (measured.collect(), turns.collect());
    json!({ "world_size": tuned.world_size, "measured": measured, "turns": turns, "ranges": tuned.ranges, "written": file })
}
