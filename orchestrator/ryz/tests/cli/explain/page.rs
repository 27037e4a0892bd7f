//! The book's page on troubleshooting is made of the entries.

use std::fmt::Write as _;
use std::path::Path;

use ryzanstein_orchestrator::catalogue::{Entry, sections};

const HEAD: &str = "\
# Troubleshooting

`ryz explain` says what an error means: `ryz explain 'NCCL WARN Call to ibv_create_qp failed'` for one message, `ryz explain - <
job.log` for a whole log. A command that fails adds the cause and the remedy to its error by itself, as far as the message does
not say them, and the closing report of `ryz launch` does so for the first failure. This page lists the same entries; for messages
of other programs it has the remedy, and `ryz explain` also the cause.

Under a launcher, read the **closing report** first: it names the first failure, and the others after `then:`. The ranks' own
errors are above it, with the prefix `[rank R]`. `RYZ_LOG__LEVEL=debug` shows more, and `NCCL_DEBUG=WARN` what NCCL says.
";

/// A sentence: its first letter a capital, unless it begins with a name or with code, and a full stop.
fn sentence(text: &str) -> String {
    let name = text.split([' ', ',']).next().unwrap_or_default();
    let is_word = name.chars().all(|c| c.is_ascii_lowercase() || c == '\'');
    let (first, rest) = text.split_at(1);
    let first = if is_word { first.to_uppercase() } else { first.to_owned() };
    format!("{first}{rest}.")
}

/// Escapes Markdown's own characters, outside of code.
fn escaped(text: &str) -> String {
    text.split('`')
        .enumerate()
        .map(
            |(index, part)| {
                if index % 2 == 0 { part.replace('*', "\\*").replace('[', "\\[") } else { part.into() }
            },
        )
        .collect::<Vec<_>>()
        .join("`")
}

/// Lines of at most 128 characters.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("never empty");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > 128 {
            lines.push(word.into());
        } else {
            let gap = if line.is_empty() { "" } else { " " };
            let _ = write!(line, "{gap}{word}");
        }
    }
    lines.join("\n")
}

/// The beginning of a message.
fn shortened(text: &str) -> String {
    const MOST: usize = 110;
    let end: String = text.chars().take(MOST).collect();
    if end.len() < text.len() { end.trim_end().to_owned() + " …" } else { end }
}

/// An entry as the page must have it.
fn written(entry: &Entry) -> String {
    let Entry { id, sample, cause, remedy, source, .. } = entry;
    let remedy = escaped(&sentence(remedy));
    if let Some(address) = source {
        let (line, remedy) = (shortened(sample.trim()), wrapped(&remedy));
        return format!("\n### [{id}]({address})\n\n```text\n{line}\n```\n\n{remedy}\n");
    }
    let cause = wrapped(&format!("**Cause.** {}", escaped(&sentence(cause))));
    let remedy = wrapped(&format!("**Remedy.** {remedy}"));
    format!("\n### {id}\n\n```text\n{}\n```\n\n{cause}\n{remedy}\n", wrapped(sample.trim()))
}

#[test]
fn the_page_on_troubleshooting_has_every_known_error() {
    let mut page = HEAD.to_owned();
    for section in sections() {
        let _ = write!(page, "\n## {}\n", section.title);
        // The numbers of NVIDIA's driver are many, and each stands in its message.
        let is_xid = |entry: &&Entry| entry.id.starts_with("xid-");
        section.entries.iter().filter(|entry| !is_xid(entry)).for_each(|entry| page += &written(entry));
        let xids: Vec<_> =
            section.entries.iter().filter(is_xid).map(|entry| format!("`{}`", entry.id)).collect();
        if !xids.is_empty() {
            let told =
                format!("`ryz explain` also knows the Xid messages of the kernel log: {}.", xids.join(", "));
            let _ = write!(page, "\n{}\n", wrapped(&told));
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/troubleshooting.md");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &page).expect("the page can be written");
    }
    assert!(
        std::fs::read_to_string(&path).is_ok_and(|there| there == page),
        "{} is not what the entries say; run `UPDATE=1 cargo test -p ryz --test cli troubleshooting` and \
         commit the result",
        path.display()
    );
}
