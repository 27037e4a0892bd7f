//! The command on a terminal: what a person sees.

use std::fs::File;
use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::support::eventually;

/// A command on a terminal with the given number of columns.
struct Session {
    child: Child,
    /// Output so far.
    written: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Session {
    fn start(arguments: &[&str], columns: u16) -> Self {
        let screen = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&screen).expect("granted");
        unlockpt(&screen).expect("unlocked");
        tcsetwinsize(&screen, Winsize { ws_row: 40, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 })
            .expect("sized");
        let name = ptsname(&screen, Vec::new()).expect("a name").into_string().expect("text");
        let open = || File::options().read(true).write(true).open(&name).expect("the other side");
        let child = Command::new(env!("CARGO_BIN_EXE_ryz"))
            .args(arguments)
            .env("RYZ_PROCESS_GROUP__BACKEND", "tcp")
            .env_remove("NO_COLOR")
            .env("TERM", "xterm")
            .stdin(Stdio::null())
            .stdout(open())
            .stderr(open())
            .spawn()
            .expect("started");
        let written = Arc::new(Mutex::new(Vec::new()));
        let (mut screen, all) = (File::from(screen), Arc::clone(&written));
        let reader = std::thread::spawn(move || {
            let mut some = [0; 4096];
            // The end is an error here: nobody has the other side any more.
            while let Ok(count @ 1..) = screen.read(&mut some) {
                all.lock().expect("no reader panics").extend_from_slice(&some[..count]);
            }
        });
        Self { child, written, reader }
    }

    /// Returns the screen, without colours and without what was overwritten.
    fn screen(&self) -> String {
        plain(&String::from_utf8_lossy(&self.written.lock().expect("no reader panics")))
    }

    /// The exit code, and everything on the screen, without colours and without what was overwritten, once the command has
    /// ended.
    fn finish(mut self) -> (Option<i32>, String) {
        let ended = eventually(|| self.child.try_wait().expect("waited"));
        let status = ended.unwrap_or_else(|| panic!("the command does not end:\n{}", self.screen()));
        eventually(|| self.reader.is_finished().then_some(())).expect("nobody writes any more");
        (status.code(), self.screen())
    }

    /// As [`finish`](Self::finish), for a command that must succeed.
    fn succeed(self) -> String {
        let (code, screen) = self.finish();
        assert_eq!(code, Some(0), "{screen}");
        screen
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Without colours; of each line, what stands behind its last return to the start.
fn plain(text: &str) -> String {
    let mut kept = String::new();
    let mut escape = false;
    for c in text.chars() {
        match c {
            '\x1b' => escape = true,
            _ if escape => escape = !c.is_ascii_alphabetic(),
            c => kept.push(c),
        }
    }
    let kept = kept.replace("\r\n", "\n");
    kept.lines().map(|line| line.rsplit('\r').next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn fixture(name: &str) -> String {
    format!("{}/../../tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn no_line_is_wider_than_the_terminal() {
    let model = fixture("llama-mha");
    let bench = ["bench", "-n", "2", "--op", "all", "--sizes", "1KB,1MB", "--iters", "3"];
    let generate =
        ["generate", "-n", "2", "--model", &model, "--prompt", "hello", "--max-new-tokens", "8", "--profile"];
    // Commands and words that each must print.
    let commands: [(&[&str], &str); 6] = [
        (&["launch", "-n", "2"], "all values are right"),
        (&["check", "-n", "2", "--targets", "--invariant"], "the same bits at every size"),
        (&bench, "reduce_scatter"),
        (&["doctor"], "loopback"),
        (&["config", "show"], "launch.grace"),
        (&generate, "tokens/s"),
    ];
    for columns in [80, 100] {
        for (command, said) in commands {
            let (code, screen) = Session::start(command, columns).finish();
            // The machine may deserve warnings.
            let is_good = code == Some(0) || (command[0] == "doctor" && code == Some(1));
            assert!(is_good && screen.contains(said), "{command:?} at {columns}: {code:?}\n{screen}");
            let longest = screen.lines().max_by_key(|line| line.chars().count()).unwrap_or_default();
            assert!(longest.chars().count() <= usize::from(columns), "{command:?} at {columns}: {longest}");
            assert!(!screen.contains(" INFO "), "{command:?} at {columns}:\n{screen}");
        }
    }
}

#[test]
fn a_benchmark_says_how_far_it_is_where_its_rows_are_not_on_the_terminal() {
    let measure = |more: &[&str]| {
        let arguments = ["bench", "-n", "2", "--sizes", "1KB,64KB", "--iters", "2"];
        let session = Session::start(&[&arguments[..], more].concat(), 100);
        let written = Arc::clone(&session.written);
        session.succeed();
        let written = written.lock().expect("no reader panics");
        String::from_utf8_lossy(&written).into_owned()
    };
    let page = measure(&["--format", "html"]);
    assert!(page.contains("2 of 2 all_reduce 64 KB"), "{page}");
    let variants = measure(&["--vary", "copies"]);
    assert!(variants.contains("tcp, round 3 of 3: 2 of 2 all_reduce 64 KB"), "{variants}");
    let table = measure(&[]);
    assert!(table.contains("all values are right") && !table.contains(" of 2 "), "{table}");
}

#[test]
fn the_first_demonstration_ends_with_what_worked() {
    let screen = Session::start(&["launch", "-n", "2"], 80).succeed();
    let last = screen.lines().last().unwrap_or_default();
    assert_eq!(last, "ryz: 2 ranks worked together: collectives and sharded layers are right");
}

#[test]
fn a_terminal_gets_text_and_figures_and_a_pipe_json() {
    let model = fixture("llama-mha");
    let arguments = ["generate", "-n", "2", "--model", &model, "--prompt", "hello", "--max-new-tokens", "8"];
    let screen = Session::start(&arguments, 80).succeed();
    let lines: Vec<&str> = screen.lines().collect();
    assert!(lines[0].starts_with("hello"), "{screen}");
    let last = lines.last().expect("a line");
    assert!(
        last.starts_with("load ") && last.contains(" · 8 tokens, ") && last.ends_with(" tokens/s"),
        "{last}"
    );
    assert!(!screen.contains("token_ids"), "{screen}");
}

#[test]
fn more_is_logged_where_that_is_asked_for() {
    let screen = Session::start(&["launch", "-n", "2", "-v"], 100).succeed();
    assert!(screen.contains(" INFO ") && screen.contains("backend tcp"), "{screen}");
}
