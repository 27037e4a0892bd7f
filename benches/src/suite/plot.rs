//! Curves over sizes as SVG. Pure.

use std::fmt::Write as _;

use ryzanstein_process_group::units;

use super::html::escape;

const WIDTH: f64 = 620.0;
const HEIGHT: f64 = 340.0;
/// Font size, large enough to be read where the plot is 400 pixels wide.
pub(super) const FONT: f64 = 17.0;
const MARGIN: f64 = 6.0;
/// Room for `0.0001 GB/s` before the grid, and for half of `100 GB` behind it.
const LEFT: f64 = 128.0;
const RIGHT: f64 = 40.0;
const POINT: f64 = 3.5;

/// The points (bytes, value) of one label, by size.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Curve {
    pub(super) label: String,
    /// Below [`COLOURS`].
    pub(super) colour: usize,
    pub(super) points: Vec<(f64, f64)>,
    /// Values that a cost model expects at the same sizes, if one applies: drawn dashed.
    pub(super) expected: Vec<(f64, f64)>,
}

/// A target value of one size, drawn as a bar that the curve should stay below.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Target {
    pub(super) label: String,
    pub(super) at: (f64, f64),
}

/// A plot of curves over sizes. Both axes are logarithmic.
pub(super) struct Plot<'a> {
    pub(super) name: &'a str,
    pub(super) curves: &'a [Curve],
    pub(super) targets: &'a [Target],
    /// Formats a value with its unit.
    pub(super) unit: fn(f64) -> String,
}

impl Plot<'_> {
    /// Draws the plot in a separate view box; `None` if there is nothing to draw. A curve has the classes `c` and
    /// `c{colour}`.
    pub(super) fn svg(&self) -> Option<String> {
        let measured = self.curves.iter().flat_map(|curve| [&curve.points, &curve.expected]);
        let points = || {
            let measured = measured.clone().flat_map(|points| drawable(points));
            measured.chain(self.targets.iter().map(|target| target.at))
        };
        let (x, y) = (Axis::around(points().map(|p| p.0))?, Axis::around(points().map(|p| p.1))?);
        let ticks: Vec<(f64, String)> = y.ticks(6).map(|tick| (tick, (self.unit)(tick))).collect();
        let sizes: Vec<(f64, String)> = x.ticks(5).map(|tick| (tick, units::bytes(tick))).collect();
        let frame = Frame {
            x,
            y,
            left: LEFT,
            right: WIDTH - RIGHT,
            top: MARGIN + FONT * 0.6,
            bottom: HEIGHT - MARGIN - 2.0 * FONT - 14.0,
        };
        let name = escape(self.name);
        let mut out =
            format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{name} by size\">\n");
        frame.grid(&mut out, &sizes, &ticks);
        for curve in self.curves {
            self.curve(&mut out, &frame, curve);
        }
        for target in self.targets {
            let (a, b) = frame.place(target.at);
            let _ = writeln!(
                out,
                "<path class=\"bar\" d=\"M{:.1} {b:.1}H{:.1}\"><title>{}</title></path>",
                a - 14.0,
                a + 14.0,
                escape(&target.label)
            );
        }
        Some(out + "</svg>\n")
    }

    fn curve(&self, out: &mut String, frame: &Frame, curve: &Curve) {
        let class = curve.colour;
        let line = |points: &[(f64, f64)]| -> String {
            let points = drawable(points).map(|point| frame.place(point));
            points.map(|(a, b)| format!("{a:.1},{b:.1}")).collect::<Vec<_>>().join(" ")
        };
        if !curve.expected.is_empty() {
            let _ = writeln!(
                out,
                "<polyline class=\"c c{class} model\" points=\"{}\"><title>{}, expected</title></polyline>",
                line(&curve.expected),
                escape(&curve.label)
            );
        }
        let _ = writeln!(out, "<polyline class=\"c c{class}\" points=\"{}\"/>", line(&curve.points));
        for point in drawable(&curve.points) {
            let (a, b) = frame.place(point);
            let expected = curve.expected.iter().find(|(bytes, _)| *bytes == point.0);
            let expected =
                expected.map_or_else(String::new, |(_, value)| format!(", expected {}", (self.unit)(*value)));
            let _ = writeln!(
                out,
                "<circle class=\"c{class}\" cx=\"{a:.1}\" cy=\"{b:.1}\" r=\"{POINT}\"><title>{}, {}: {}{expected}</title></circle>",
                escape(&curve.label),
                units::bytes(point.0),
                (self.unit)(point.1),
            );
        }
    }

    /// Returns the meaning of the other lines.
    pub(super) fn legend(&self) -> String {
        let expected = self.curves.iter().any(|curve| !curve.expected.is_empty());
        let parts = [
            (true, "dots: measured"),
            (expected, "dotted lines: expected by the cost model"),
            (!self.targets.is_empty(), "bars: targets"),
        ];
        parts
            .into_iter()
            .filter(|(is_there, _)| *is_there)
            .map(|(_, what)| what)
            .collect::<Vec<_>>()
            .join("; ")
    }
}

/// Returns the points that have logarithms.
fn drawable(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> {
    points.iter().copied().filter(|(a, b)| *a > 0.0 && *b > 0.0)
}

/// The position of the grid in the view box.
struct Frame {
    x: Axis,
    y: Axis,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

impl Frame {
    fn place(&self, (a, b): (f64, f64)) -> (f64, f64) {
        (
            self.left + self.x.share(a) * (self.right - self.left),
            self.bottom - self.y.share(b) * (self.bottom - self.top),
        )
    }

    fn grid(&self, out: &mut String, sizes: &[(f64, String)], values: &[(f64, String)]) {
        let Self { left, right, top, bottom, .. } = self;
        for (tick, label) in sizes {
            let (at, _) = self.place((*tick, 1.0));
            let _ = writeln!(
                out,
                "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{top:.1}\" x2=\"{at:.1}\" y2=\"{bottom:.1}\"/>\
                 <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
                bottom + FONT + 8.0
            );
        }
        for (tick, label) in values {
            let (_, at) = self.place((1.0, *tick));
            let _ = writeln!(
                out,
                "<line class=\"grid\" x1=\"{left:.1}\" y1=\"{at:.1}\" x2=\"{right:.1}\" y2=\"{at:.1}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                left - 8.0,
                at + FONT * 0.35
            );
        }
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">bytes of the whole array</text>",
            f64::midpoint(*left, *right),
            bottom + 2.0 * FONT + 12.0
        );
    }
}

/// Number of colours.
pub(super) const COLOURS: usize = 10;

/// A logarithmic axis over whole powers of ten.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Axis {
    low: i32,
    high: i32,
}

impl Axis {
    fn around(values: impl Iterator<Item = f64>) -> Option<Self> {
        let range = values.fold(None, |range: Option<(f64, f64)>, v| {
            Some(range.map_or((v, v), |(low, high)| (low.min(v), high.max(v))))
        });
        range.map(|(low, high)| {
            let low = low.log10().floor() as i32;
            Self { low, high: (high.log10().ceil() as i32).max(low + 1) }
        })
    }

    fn share(self, value: f64) -> f64 {
        (value.log10() - f64::from(self.low)) / f64::from(self.high - self.low)
    }

    /// Returns at most `most` powers of ten, evenly spaced, so that their labels do not overlap.
    fn ticks(self, most: usize) -> impl Iterator<Item = f64> {
        let step = (self.high - self.low) as usize / most + 1;
        (self.low..=self.high).step_by(step).map(|power| 10f64.powi(power))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(f64, f64)]) -> Curve {
        Curve { label: "all_reduce".into(), colour: 0, points: points.to_vec(), expected: Vec::new() }
    }

    fn plot<'a>(curves: &'a [Curve], targets: &'a [Target]) -> Plot<'a> {
        Plot { name: "latency", curves, targets, unit: units::time }
    }

    #[test]
    fn an_axis_spans_whole_powers_of_ten_and_never_nothing() {
        assert_eq!(Axis::around([20.0, 3000.0].into_iter()), Some(Axis { low: 1, high: 4 }));
        assert_eq!(Axis::around([10.0].into_iter()), Some(Axis { low: 1, high: 2 }));
        assert_eq!(Axis::around([].into_iter()), None);
        assert_eq!(Axis { low: 1, high: 3 }.share(100.0), 0.5);
        assert_eq!(Axis { low: 0, high: 6 }.ticks(4).collect::<Vec<_>>(), [1.0, 100.0, 1e4, 1e6]);
    }

    #[test]
    fn points_without_a_logarithm_are_left_out() {
        let curves = [curve(&[(0.0, 5.0), (10.0, 0.0), (100.0, 7.0)])];
        let drawn = plot(&curves, &[]).svg().expect("a point");
        assert_eq!(drawn.matches("<circle").count(), 1);
        assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
        assert_eq!(plot(&[], &[]).svg(), None);
    }

    #[test]
    fn points_targets_and_models_tell_their_values() {
        let curves = [Curve { expected: vec![(1e5, 400.0)], ..curve(&[(1e5, 450.0)]) }];
        let targets = [Target { label: "all_reduce 100 KB < 500 us".into(), at: (1e5, 500.0) }];
        let plot = plot(&curves, &targets);
        let drawn = plot.svg().expect("a plot");
        for wanted in [
            "<title>all_reduce, 100 KB: 450 us, expected 400 us</title>",
            "all_reduce 100 KB &lt; 500 us",
            " model\"",
        ] {
            assert!(drawn.contains(wanted), "`{wanted}` is not in\n{drawn}");
        }
        assert_eq!(plot.legend(), "dots: measured; dotted lines: expected by the cost model; bars: targets");
    }
}
