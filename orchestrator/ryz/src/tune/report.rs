//! The measurements and the changes, for people and for programs.

use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::paths::tuned::TunedRange;
use ryzanstein_process_group::units;
use serde_json::{Value, json};

use super::crossover::{Timed, choose};
use super::measure::{Sizes, Tuned};
use ryzanstein_orchestrator::table::{Cell, Column, Screen, Tone, table as layout, wrap};

/// Formats the measurements as a table, then the lines that the table of paths gains and loses. `old` are its lines so far.
pub fn table(tuned: &Tuned, old: &[TunedRange], screen: Screen) -> String {
    let columns = [
        Column::left("operation"),
        Column::right("bytes"),
        Column::left("built in"),
        Column::right("median"),
        Column::left("quickest"),
        Column::right("median"),
        Column::left("taken"),
    ];
    let mut text = format!(
        "Every path on its own, medians of rounds:\n{}",
        layout(&columns, &all(tuned).map(row).collect::<Vec<_>>(), screen)
    );
    if tuned.ranges.is_empty() {
        text += "No path is clearly quicker than the built-in one.\n";
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

/// Returns each size with its operation and the path that is chosen over the built-in one.
fn all(tuned: &Tuned) -> impl Iterator<Item = (&'static str, &Timed, Option<Path>)> {
    tuned.operations.iter().flat_map(|Sizes { what, sizes }| {
        sizes.iter().zip(choose(sizes)).map(|(timed, path)| (what.name(), timed, path))
    })
}

fn row((name, timed, chosen): (&'static str, &Timed, Option<Path>)) -> Vec<Cell> {
    let time = |us: Option<f64>| us.map_or_else(|| "-".into(), |us| Cell::from(units::time(us)));
    let quickest = timed.quickest();
    let gain = chosen.and_then(|path| Some((path, timed.gain(path)?)));
    vec![
        name.into(),
        units::bytes(timed.bytes as f64).into(),
        timed.built_in.to_string().into(),
        time(timed.on(timed.built_in).map(|times| times.median_us)),
        quickest.map_or_else(|| "-".into(), |(path, _)| path.to_string().into()),
        time(quickest.map(|(_, times)| times.median_us)),
        gain.map_or_else(
            || "-".into(),
            |(path, gain)| Cell::new(format!("{path}, {gain:.2} times as fast"), Tone::Good),
        ),
    ]
}

/// Returns the same as one object of JSON; `file` is the path of the written table.
pub fn json(tuned: &Tuned, file: Option<&str>) -> Value {
    let measured = all(tuned).map(|(name, timed, chosen)| {
        let paths = timed.paths.iter().map(|(path, times)| {
            json!({ "path": path.to_string(), "median_us": times.median_us, "p25_us": times.p25_us, "p75_us": times.p75_us,
                    "rounds": times.calls })
        });
        let paths: Vec<Value> = paths.collect();
        json!({ "operation": name, "bytes": timed.bytes, "built_in": timed.built_in.to_string(), "paths": paths,
                "taken": chosen.map(|path| path.to_string()), "gain": chosen.and_then(|path| timed.gain(path)) })
    });
    let measured: Vec<Value> = measured.collect();
    json!({ "world_size": tuned.world_size, "measured": measured, "ranges": tuned.ranges, "written": file })
}
