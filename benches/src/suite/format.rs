//! Formats a result as text.

use std::fmt::Write as _;

use ryzanstein_orchestrator::table::{Screen, Tone};
use ryzanstein_process_group::units;

use super::report::Report;
use super::rows::{csv, json, table, verdict_table};
use super::{html, saturation, steps};

/// Output formats.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// A table for people.
    Table,
    /// One object per line.
    Json,
    /// A header and one line per row.
    Csv,
    /// A self-contained page with plots.
    Html,
}

impl Report {
    /// Formats the result in one format, ending with a line break.
    pub fn text(&self, format: Format) -> String {
        match format {
            Format::Table => {
                let screen = Screen::PLAIN;
                let table = table(&self.rows, self.judged, screen);
                format!("{}\n\n{table}\n{}", self.heading, self.conclusion(screen))
            }
            Format::Json => {
                let steps = self.step_rows().iter().map(steps::json);
                self.rows.iter().map(json).chain(steps).fold(String::new(), |all, line| all + &line + "\n")
            }
            Format::Csv => csv(&self.rows),
            Format::Html => html::page(self),
        }
    }

    /// Returns every documented target with the measured value; empty if nothing is judged.
    pub fn targets(&self, screen: Screen) -> String {
        if !self.judged {
            return String::new();
        }
        let head = "Documented targets, for 4 GPUs with NVLink:";
        format!("{head}\n{}\n", verdict_table(&self.verdicts(), screen))
    }

    /// Returns the text that follows the rows: the targets, and the correctness of the values.
    pub fn conclusion(&self, screen: Screen) -> String {
        let mut text = String::new();
        let steps = self.steps_text(screen);
        if !steps.is_empty() {
            let _ = writeln!(text, "{steps}");
        }
        text += &self.targets(screen);
        let best = saturation(&self.rows);
        if !best.is_empty() {
            let _ = writeln!(text, "Bus bandwidth is within a tenth of its best from these sizes on:");
            for (label, row) in best {
                let _ =
                    writeln!(text, "{label}: {} ({:.3} GB/s)", units::bytes(row.bytes as f64), row.busbw_gbs);
            }
            text.push('\n');
        }
        let wrong: u64 = self.rows.iter().map(|row| row.errors).sum();
        let _ = match wrong {
            0 if !self.is_correct() => writeln!(text, "{}", screen.paint(Tone::Bad, "LOGITS ARE WRONG")),
            0 => writeln!(text, "{}", screen.paint(Tone::Good, "all values are right")),
            wrong => writeln!(text, "{}", screen.paint(Tone::Bad, &format!("{wrong} VALUES ARE WRONG"))),
        };
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use crate::measure::{Case, Collective};
    use crate::suite::tests::row;
    use ryzanstein_process_group::paths::{Algorithm, Path, PathChoice};

    fn report() -> Report {
        let rows = vec![
            row(Collective::AllReduce, 1000, 20.5),
            row(Collective::AllReduce, 100_000_000, 20_000.0),
            row(Collective::Barrier, 0, 9.0),
        ];
        Report { heading: "4 ranks <here>".into(), judged: true, rows, link_gbs: None, steps: None }
    }

    #[test]
    fn json_lines_have_the_documented_fields_in_their_order() {
        let text = report().text(Format::Json);
        assert_eq!(
            text.lines().next(),
            Some(
                r#"{"op":"all_reduce","dtype":"f32","bytes":1000,"world_size":4,"backend":"tcp","path":"tcp/ring","median_us":20.5,"p99_us":41.0,"algbw_gbs":0.04878048780487805,"busbw_gbs":0.07317073170731708,"errors":0,"target_us":500.0,"meets_target":true,"link_share":null,"expected_us":null,"expected_error_percent":null,"p25_us":20.5,"p75_us":20.5,"calls":10,"graph":false}"#
            )
        );
        assert_eq!(text.lines().count(), 3);
        assert!(
            text.lines().nth(2).is_some_and(|l| l.contains(r#""target_us":null,"meets_target":null"#)),
            "{text}"
        );
    }

    #[test]
    fn lines_of_json_say_why_each_path_was_taken() {
        let mut report = report();
        let (path, expected) = (Path::Tcp(Algorithm::Direct), Some(Duration::from_micros(20)));
        let choice = PathChoice { path, reason: "it costs least".into(), expected };
        report.rows[0].explain(&Case::new(Collective::AllReduce, 1000, 1), &choice, None);
        let (expected, error) = (report.rows[0].expected_us, report.rows[0].expected_error_percent);
        assert_eq!((expected, error.map(f64::round)), (Some(20.0), Some(2.0)));
        let json = report.text(Format::Json);
        let end = r#","graph":false,"reason":"it costs least"}"#;
        assert!(json.lines().next().is_some_and(|line| line.ends_with(end)), "{json}");
    }

    #[test]
    fn csv_has_as_many_cells_in_each_line_as_in_its_head() {
        let text = report().text(Format::Csv);
        let widths: Vec<usize> = text.lines().map(|l| l.split(',').count()).collect();
        assert_eq!(widths, [21; 4], "{text}");
    }

    #[test]
    fn a_wrong_value_and_a_missed_target_are_told_apart() {
        let mut report = report();
        assert!(report.is_correct() && report.missed_targets().len() == 2);
        report.rows[1].median_us = 1.0;
        let missed = report.missed_targets();
        assert!(missed.len() == 1 && missed[0].starts_with("all_reduce, best bus bandwidth ("), "{missed:?}");
        report.rows[1].busbw_gbs = 100.0;
        assert_eq!(report.missed_targets(), [""; 0]);
        assert!(report.unmeasured_targets().contains(&"broadcast 100 MB".to_owned()));
        report.rows[0].errors = 3;
        assert!(!report.is_correct());
        assert!(report.text(Format::Table).ends_with("3 VALUES ARE WRONG\n"));
    }

    #[test]
    fn targets_are_shown_where_rows_are_judged_only() {
        let mut report = report();
        assert!(report.text(Format::Table).contains("Documented targets"));
        report.judged = false;
        for format in [Format::Table, Format::Html] {
            let text = report.text(format);
            assert!(!text.contains("target") && !text.contains("verdict"), "{text}");
        }
    }

    #[test]
    fn the_page_stands_alone_and_shows_what_it_is_told_as_text() {
        let page = report().text(Format::Html);
        assert!(page.starts_with("<!doctype html>") && page.contains("4 ranks &lt;here&gt;"));
        assert_eq!(page.matches("<svg").count(), 2);
        assert!(page.contains("prefers-color-scheme: dark"));
        for figure in
            ["<th class=\"n\">median</th>", "<td class=\"n\">20.5 us</td>", "auto, 1 KB: 20.5 us</title>"]
        {
            assert!(page.contains(figure), "{figure}");
        }
        assert!(page.contains("all_reduce 100 MB &lt; 10 ms"), "{page}");
        for outside in ["http://www.w3.org", "src=", "href=", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
    }
}
