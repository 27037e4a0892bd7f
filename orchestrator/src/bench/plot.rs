//! Curves over sizes as SVG. Pure.

use std::fmt::Write as _;

use ryzanstein_process_group::units;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 44.0;

/// Points (bytes, value) of one label, by size.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Curve {
    pub(super) label: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// Both axes are logarithmic. `unit` shows a value with its unit. Curve `i` has the classes `c` and `c{i % 10}`.
pub(super) fn svg(name: &str, curves: &[Curve], unit: impl Fn(f64) -> String) -> String {
    let points = || curves.iter().flat_map(|c| &c.points).filter(|(x, y)| *x > 0.0 && *y > 0.0);
    let (Some(x), Some(y)) = (Axis::around(points().map(|p| p.0)), Axis::around(points().map(|p| p.1)))
    else {
        return format!("<p>{name}: nothing to draw.</p>\n");
    };
    let right = WIDTH - RIGHT;
    let bottom = HEIGHT - BOTTOM;
    let place =
        |(a, b): (f64, f64)| (LEFT + x.share(a) * (right - LEFT), bottom - y.share(b) * (bottom - TOP));
    let mut out =
        format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{name} by size\">\n");
    for tick in x.ticks() {
        let (at, _) = place((tick, 1.0));
        let label = units::bytes(tick);
        let _ = writeln!(
            out,
            "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
            bottom + 18.0
        );
    }
    for tick in y.ticks() {
        let (_, at) = place((1.0, tick));
        let _ = writeln!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            at + 4.0,
            unit(tick)
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">bytes of the whole array</text>",
        f64::midpoint(LEFT, right),
        HEIGHT - 6.0
    );
    for (index, curve) in curves.iter().enumerate() {
        let class = index % COLOURS;
        let drawn = || curve.points.iter().copied().filter(|(a, b)| *a > 0.0 && *b > 0.0);
        let line: Vec<String> = drawn().map(place).map(|(a, b)| format!("{a:.1},{b:.1}")).collect();
        let _ = writeln!(out, "<polyline class=\"c c{class}\" points=\"{}\"/>", line.join(" "));
        for point in drawn() {
            let (a, b) = place(point);
            let _ = writeln!(
                out,
                "<circle class=\"c{class}\" cx=\"{a:.1}\" cy=\"{b:.1}\" r=\"3\"><title>{}, {}: {}</title></circle>",
                curve.label,
                units::bytes(point.0),
                unit(point.1)
            );
        }
    }
    out + "</svg>\n"
}

/// How many colours there are; curves beyond begin again.
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

    fn ticks(self) -> impl Iterator<Item = f64> {
        (self.low..=self.high).map(|power| 10f64.powi(power))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_spans_whole_powers_of_ten_and_never_nothing() {
        assert_eq!(Axis::around([20.0, 3000.0].into_iter()), Some(Axis { low: 1, high: 4 }));
        assert_eq!(Axis::around([10.0].into_iter()), Some(Axis { low: 1, high: 2 }));
        assert_eq!(Axis::around([].into_iter()), None);
        assert_eq!(Axis { low: 1, high: 3 }.share(100.0), 0.5);
    }

    #[test]
    fn points_without_a_logarithm_are_left_out() {
        let curve = Curve { label: "x".into(), points: vec![(0.0, 5.0), (10.0, 0.0), (100.0, 7.0)] };
        let drawn = svg("latency", &[curve], |v| v.to_string());
        assert_eq!(drawn.matches("<circle").count(), 1);
        assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
        assert!(svg("latency", &[], |v| v.to_string()).contains("nothing to draw"));
    }
}
