//! Tables and texts for terminals, files and pipes; the profile as a table.

use std::fmt::Write as _;

use ryzanstein_process_group::ProfileRow;
use ryzanstein_process_group::catalogue::without_colors;
use ryzanstein_process_group::targets::target;
use ryzanstein_process_group::units::{bytes, time};

/// Number of calls below which calls are cold starts, to which no target applies.
const JUDGED_FROM: u64 = 5;

/// The destination of a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Screen {
    /// Maximum number of characters in a line; `None` if lines may be of any length, as in a file.
    pub width: Option<usize>,
    /// True if ANSI colours are supported.
    pub color: bool,
}

impl Screen {
    /// A file or a pipe: no limit and no colours.
    pub const PLAIN: Self = Self { width: None, color: false };

    /// Returns `text` in the colour of `tone`.
    pub fn paint(self, tone: Tone, text: &str) -> String {
        match tone {
            Tone::Plain => text.to_owned(),
            _ if !self.color => text.to_owned(),
            Tone::Good => format!("\x1b[32m{text}\x1b[0m"),
            Tone::Warning => format!("\x1b[33m{text}\x1b[0m"),
            Tone::Bad => format!("\x1b[1;31m{text}\x1b[0m"),
            Tone::Faint => format!("\x1b[2m{text}\x1b[0m"),
            Tone::Strong => format!("\x1b[1m{text}\x1b[0m"),
        }
    }
}

/// The tone of a text; a colour represents each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Tone {
    /// No special meaning.
    #[default]
    Plain,
    /// The expected state.
    Good,
    /// A warning.
    Warning,
    /// A failure.
    Bad,
    /// Less important than the rest.
    Faint,
    /// A heading.
    Strong,
}

/// A cell of a table.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// Creates a text with a tone.
    pub fn new(text: impl Into<String>, tone: Tone) -> Self {
        Self { text: text.into(), tone }
    }

    /// Returns the text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the tone.
    pub const fn tone(&self) -> Tone {
        self.tone
    }

    /// Creates a verdict: `met` or `missed`; a dash if nothing was judged.
    pub fn verdict(met: Option<bool>) -> Self {
        match met {
            Some(true) => Self::new("met", Tone::Good),
            Some(false) => Self::new("missed", Tone::Warning),
            None => "-".into(),
        }
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self { text, tone: Tone::Plain }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

/// A column of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Column<'a> {
    head: &'a str,
    is_left: bool,
    /// Priority of leaving out the column if lines are too long: columns with the greatest number are left out first; one with
    /// 0 stays.
    drop_priority: u8,
}

impl<'a> Column<'a> {
    /// Creates a column of texts.
    pub const fn left(head: &'a str) -> Self {
        Self { head, is_left: true, drop_priority: 0 }
    }

    /// Creates a column of numbers.
    pub const fn right(head: &'a str) -> Self {
        Self { head, is_left: false, drop_priority: 0 }
    }

    /// Returns the text above the column.
    pub const fn head(&self) -> &'a str {
        self.head
    }

    /// Returns true if texts are aligned to the left.
    pub const fn is_left(&self) -> bool {
        self.is_left
    }

    /// Sets the priority of leaving out the column if lines are too long: columns with the greatest number are left out first.
    #[must_use]
    pub const fn drop_priority(self, order: u8) -> Self {
        Self { drop_priority: order, ..self }
    }
}

/// Columns with their widths, fitted to a screen. Rows can be written one by one.
#[derive(Clone, Debug)]
pub struct Layout<'a> {
    /// Each column with its width; `None` for a column that is left out.
    columns: Vec<(Column<'a>, Option<usize>)>,
    screen: Screen,
}

/// Number of spaces between two columns.
const GAP: usize = 2;

impl<'a> Layout<'a> {
    /// Creates columns as wide as their heads and `widths`, as far as they fit the screen. If even the remaining columns do not
    /// fit, the widest of their texts is cut.
    pub fn new(columns: &[Column<'a>], widths: &[usize], screen: Screen) -> Self {
        let widths = widths.iter().copied().chain(std::iter::repeat(0));
        let mut columns: Vec<(Column<'a>, Option<usize>)> =
            columns.iter().zip(widths).map(|(c, w)| (*c, Some(w.max(c.head.chars().count())))).collect();
        let total = |columns: &[(Column<'_>, Option<usize>)]| {
            let shown = columns.iter().filter_map(|(_, width)| *width);
            shown.map(|width| width + GAP).sum::<usize>().saturating_sub(GAP)
        };
        let most = screen.width.unwrap_or(usize::MAX);
        while total(&columns) > most {
            let shown = columns.iter_mut().filter(|(c, width)| width.is_some() && c.drop_priority > 0);
            let Some(next) = shown.max_by_key(|(c, _)| c.drop_priority) else { break };
            next.1 = None;
        }
        let excess = total(&columns).saturating_sub(most);
        let texts = columns.iter_mut().filter(|(c, _)| c.is_left);
        if let Some((column, Some(width))) = texts.max_by_key(|(_, width)| *width) {
            *width = width.saturating_sub(excess).max(column.head.chars().count());
        }
        Self { columns, screen }
    }

    /// Returns the header line, with its line break.
    pub fn head(&self) -> String {
        self.line(self.columns.iter().map(|(column, _)| Cell::new(column.head, Tone::Strong)))
    }

    /// Returns the line of a row, with its line break.
    pub fn row(&self, cells: &[Cell]) -> String {
        self.line(cells.iter().cloned())
    }

    fn line(&self, cells: impl Iterator<Item = Cell>) -> String {
        // Spaces are written only before further text: no line ends with any.
        let (mut line, mut owed) = (String::new(), 0);
        for ((column, width), cell) in self.columns.iter().zip(cells) {
            let Some(width) = *width else { continue };
            // A number that has lost digits is wrong, so it may overflow its column.
            let text = if column.is_left { cut(&cell.text, width) } else { cell.text };
            let padding = width.saturating_sub(text.chars().count());
            let (before, after) = if column.is_left { (0, padding) } else { (padding, 0) };
            if text.is_empty() {
                owed += before + after + GAP;
                continue;
            }
            let _ = write!(line, "{:1$}", "", owed + before);
            line += &self.screen.paint(cell.tone, &text);
            owed = after + GAP;
        }
        line + "\n"
    }
}

/// Returns at most `width` characters.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// Returns an error that may quote anything, such as a whole file, for people: its beginning, without escape sequences and other
/// control characters, which could change the terminal.
pub fn printable(error: &str) -> String {
    /// Maximum number of characters. Nobody reads more.
    const LONGEST: usize = 3000;
    let text = without_colors(error);
    let shown =
        |c: char| if c.is_control() && c != '\n' && c != '\t' { char::REPLACEMENT_CHARACTER } else { c };
    let mut rest = text.chars().map(shown);
    let mut cut: String = rest.by_ref().take(LONGEST).collect();
    match rest.count() {
        0 => {}
        left => drop(write!(cut, "… ({left} more characters)")),
    }
    cut
}

/// Formats the rows as a table with a header line.
pub fn table(columns: &[Column<'_>], rows: &[Vec<Cell>], screen: Screen) -> String {
    let mut widths = vec![0; columns.len()];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.text.chars().count());
        }
    }
    let layout = Layout::new(columns, &widths, screen);
    rows.iter().fold(layout.head(), |text, row| text + &layout.row(row))
}

/// Formats a table without colours or limits: the first `left` columns are aligned to the left, the others to the right.
pub fn columns(head: &[&str], left: usize, rows: &[Vec<String>]) -> String {
    let column = |(index, head)| if index < left { Column::left(head) } else { Column::right(head) };
    let columns: Vec<Column<'_>> = head.iter().copied().enumerate().map(column).collect();
    let rows: Vec<Vec<Cell>> =
        rows.iter().map(|row| row.iter().map(|cell| cell.as_str().into()).collect()).collect();
    table(&columns, &rows, Screen::PLAIN)
}

/// Formats a text in lines that fit the screen, each after `indent` spaces except for the first. A word that is too wide for
/// that, such as a path, stays whole and begins further left.
pub fn wrap(text: &str, indent: usize, screen: Screen) -> String {
    let Some(width) = screen.width else { return text.to_owned() };
    let most = width.saturating_sub(indent).max(20);
    let words = text.trim_start_matches(' ');
    let mut lines: Vec<String> = vec![" ".repeat(text.len() - words.len())];
    for word in words.split(' ') {
        let line = lines.last_mut().expect("never empty");
        if !line.trim_start().is_empty() && line.chars().count() + 1 + word.chars().count() > most {
            lines.push(word.to_owned());
        } else {
            if !line.trim_start().is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    let mut lines = lines.into_iter();
    let first = lines.next().unwrap_or_default();
    lines.fold(first, |text, line| {
        let indent = indent.min(width.saturating_sub(line.chars().count()));
        format!("{text}\n{:indent$}{line}", "")
    })
}

/// Returns the cells of a documented target and of the verdict on a latency.
fn judged(op: &str, bytes: u64, median_us: f64) -> [Cell; 2] {
    match target(op, bytes) {
        None => ["-".into(), Cell::verdict(None)],
        Some(t) => [format!("< {}", time(t.below_us)).into(), Cell::verdict(Some(median_us < t.below_us))],
    }
}

/// Figures of calls of one kind, as every table of latencies shows them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Figures {
    /// Bytes of the whole array.
    pub bytes: f64,
    /// Number of calls.
    pub calls: u64,
    /// Median, 90th and 99th percentile and largest latency, in microseconds.
    pub latency_us: [f64; 4],
    /// Algorithm bandwidth in 10⁹ bytes per second.
    pub algbw_gbs: f64,
    /// Bus bandwidth in 10⁹ bytes per second.
    pub busbw_gbs: f64,
}

impl Figures {
    /// The columns of [`cells`](Self::cells).
    pub const COLUMNS: [Column<'static>; 8] = [
        Column::right("bytes"),
        Column::right("calls").drop_priority(6),
        Column::right("median"),
        Column::right("p90").drop_priority(8),
        Column::right("p99").drop_priority(3),
        Column::right("max").drop_priority(9),
        Column::right("algbw GB/s").drop_priority(7),
        Column::right("busbw GB/s").drop_priority(2),
    ];

    /// Returns the cells of one row.
    pub fn cells(&self) -> [Cell; 8] {
        let [median, p90, p99, max] = self.latency_us.map(time);
        let bandwidth = |gbs: f64| format!("{gbs:.3}");
        [
            bytes(self.bytes).into(),
            self.calls.to_string().into(),
            median.into(),
            p90.into(),
            p99.into(),
            max.into(),
            bandwidth(self.algbw_gbs).into(),
            bandwidth(self.busbw_gbs).into(),
        ]
    }
}

/// Formats the rows of a profile as a table with percentiles, bandwidths and path; if the capability of the links is known,
/// with the share of it that was used; and with `targets`, with the documented targets and the verdicts on them.
pub fn profile(rows: &[ProfileRow], targets: bool, screen: Screen) -> String {
    let linked = rows.iter().any(|r| r.link_share.is_some());
    let names = [
        Column::left("group").drop_priority(4),
        Column::left("operation"),
        Column::left("dtype").drop_priority(5),
        Column::left("path").drop_priority(1),
    ];
    let share: &[Column<'_>] = if linked { &[Column::right("of NVLink").drop_priority(2)] } else { &[] };
    let judgement: &[Column<'_>] =
        if targets { &[Column::right("target").drop_priority(3), Column::left("verdict")] } else { &[] };
    let columns = [&names[..], &Figures::COLUMNS, share, judgement].concat();
    let cells: Vec<Vec<Cell>> = rows.iter().map(|row| profile_cells(row, linked, targets)).collect();
    table(&columns, &cells, screen)
}

fn profile_cells(r: &ProfileRow, linked: bool, targets: bool) -> Vec<Cell> {
    let reduction = r.reduction.map_or_else(String::new, |op| format!("({op})"));
    let figures = Figures {
        bytes: r.bytes_mean,
        calls: r.calls,
        latency_us: [r.median_us, r.p90_us, r.p99_us, r.max_us],
        algbw_gbs: r.algbw_gbs,
        busbw_gbs: r.busbw_gbs,
    };
    let mut row: Vec<Cell> = vec![
        r.group.as_str().into(),
        format!("{}{reduction}", r.op).into(),
        r.dtype.to_string().into(),
        r.path.as_str().into(),
    ];
    if r.timed == 0 {
        row.extend([Cell::from(bytes(r.bytes_mean)), r.calls.to_string().into()]);
        row.extend((2..Figures::COLUMNS.len()).map(|_| "-".into()));
    } else {
        row.extend(figures.cells());
    }
    if linked {
        row.push(r.link_share.map_or_else(|| "-".into(), |share| format!("{:.1} %", share * 100.0).into()));
    }
    if targets && (r.timed < JUDGED_FROM || r.path == "local") {
        row.extend(["-".into(), Cell::verdict(None)]);
    } else if targets {
        row.extend(judged(r.op, r.bytes_mean as u64, r.median_us));
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_neither_changes_the_terminal_nor_quotes_a_whole_file() {
        assert_eq!(printable("\x1b[31mred\x1b[0m\tline\nnext"), "red\tline\nnext");
        assert_eq!(printable("a\x07\rb"), "a\u{fffd}\u{fffd}b");
        let long = printable(&"é".repeat(3010));
        assert!(long.ends_with("é… (10 more characters)") && long.chars().count() < 3030, "{long}");
    }

    #[test]
    fn columns_line_up() {
        let rows = vec![vec!["a".into(), "1".into()], vec!["bcd".into(), "22".into()]];
        assert_eq!(columns(&["x", "n"], 1, &rows), "x     n\na     1\nbcd  22\n");
    }

    const COLUMNS: [Column<'static>; 3] = [
        Column::left("name"),
        Column::right("p99").drop_priority(2),
        Column::right("median").drop_priority(1),
    ];

    fn narrow(width: usize) -> String {
        let row = vec!["all_reduce".into(), "12.5 ms".into(), "9.1 ms".into()];
        table(&COLUMNS, &[row], Screen { width: Some(width), color: false })
    }

    #[test]
    fn columns_that_do_not_fit_are_left_out_the_most_dispensable_first() {
        assert_eq!(narrow(27), "name            p99  median\nall_reduce  12.5 ms  9.1 ms\n");
        assert_eq!(narrow(26), "name        median\nall_reduce  9.1 ms\n");
        assert_eq!(narrow(17), "name\nall_reduce\n");
        assert_eq!(narrow(7), "name\nall_re…\n");
    }

    #[test]
    fn numbers_are_never_cut() {
        let layout = Layout::new(&[Column::left("x"), Column::right("wrong")], &[1, 0], Screen::PLAIN);
        assert_eq!(layout.row(&["a".into(), "2621440".into()]), "a  2621440\n");
        assert_eq!(layout.row(&["abc".into(), "0".into()]), "…      0\n");
    }

    #[test]
    fn no_line_is_longer_than_the_screen() {
        for width in 4..60 {
            let text = narrow(width);
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}: {text}");
            let text = wrap(
                "a few words, and averyverylongone that follows",
                2,
                Screen { width: Some(width), color: false },
            );
            let longest = text.lines().map(|line| line.chars().count()).max();
            assert!(longest <= Some(width.max(22)), "{width}: {text}");
        }
    }

    #[test]
    fn a_path_wider_than_its_column_stays_whole_and_on_the_screen() {
        let path = "/home/somebody/environments/here/lib/python3.11/site-packages/libnccl.so.2";
        let text =
            wrap(&format!("2.30.7, {path}, found there"), 60, Screen { width: Some(80), color: false });
        assert_eq!(text, format!("2.30.7,\n{:5}{path},\n{:60}found there", "", ""));
    }

    #[test]
    fn colours_stand_around_words_and_widths_ignore_them() {
        let screen = Screen { width: None, color: true };
        let rows =
            [vec![Cell::verdict(Some(true)), "1".into()], vec![Cell::verdict(Some(false)), "2".into()]];
        let text = table(&[Column::left("v"), Column::right("n")], &rows, screen);
        assert_eq!(
            text,
            "\x1b[1mv\x1b[0m       \x1b[1mn\x1b[0m\n\x1b[32mmet\x1b[0m     1\n\x1b[33mmissed\x1b[0m  2\n"
        );
    }
}
