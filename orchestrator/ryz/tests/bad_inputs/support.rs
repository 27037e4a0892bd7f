//! One case: what is given to `ryz`, and what it must answer.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ryzanstein_tests::fixtures;

/// A case that takes longer hangs. Most take milliseconds, some take ten seconds of processor time, and the machine may be busy.
const DEADLINE: Duration = Duration::from_secs(300);

/// Far more than any of these commands needs, in KiB of addresses.
const ADDRESSES_KIB: u64 = 8 << 20;

/// Nobody reads more than this of an error.
const LONGEST_OUTPUT: usize = 4000;

/// A user other than that of the tests.
const NOBODY: u32 = 65534;

/// Content of a path.
#[derive(Clone)]
pub(crate) enum Content {
    Bytes(Vec<u8>),
    Pipe,
    Folder,
    Device,
    /// So many bytes that nobody wrote.
    Sparse(u64),
    /// A file that every user may write.
    Writable(&'static str),
    /// A file of another user. Only root can make one.
    Foreign(&'static str),
    Absent,
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Self::Bytes(text.into())
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self::Bytes(text.into())
    }
}

impl From<Vec<u8>> for Content {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes)
    }
}

impl Content {
    fn place(&self, path: &Path) {
        let _ = std::fs::remove_file(path);
        match self {
            Self::Bytes(bytes) => std::fs::write(path, bytes).expect("written"),
            Self::Pipe => {
                use rustix::fs::{CWD, FileType, Mode, mknodat};
                mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
            }
            Self::Folder => std::fs::create_dir(path).expect("a folder"),
            Self::Device => std::os::unix::fs::symlink("/dev/zero", path).expect("a link"),
            Self::Sparse(length) => File::create(path).expect("a file").set_len(*length).expect("as long"),
            Self::Writable(text) => {
                std::fs::write(path, text).expect("written");
                std::fs::set_permissions(path, PermissionsExt::from_mode(0o666)).expect("chmod");
            }
            Self::Foreign(text) => {
                std::fs::write(path, text).expect("written");
                std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).expect("given away by root");
            }
            Self::Absent => {}
        }
    }
}

/// One wrong use. In arguments, variables and words, `{}` stands for the case's own folder, in which the command runs.
pub(crate) struct Case {
    what: String,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    /// True if the folder is a model's, less what `files` replaces.
    is_model: bool,
    files: Vec<(String, Content)>,
    code: i32,
    words: Vec<String>,
    /// Words that must not be said.
    without: &'static str,
}

impl Case {
    /// `ryz` with these arguments, separated by spaces, must end with code 2 and say these words.
    pub(crate) fn new(arguments: &str, words: &[&str]) -> Self {
        Self {
            what: arguments.into(),
            arguments: arguments.split_whitespace().map(str::to_owned).collect(),
            environment: Vec::new(),
            is_model: false,
            files: Vec::new(),
            code: 2,
            words: words.iter().map(ToString::to_string).collect(),
            without: "panicked at",
        }
    }

    /// One more argument, which may be empty or have spaces.
    pub(crate) fn argument(mut self, argument: &str) -> Self {
        self.what = format!("{} `{argument}`", self.what);
        self.arguments.push(argument.into());
        self
    }

    pub(crate) fn variable(mut self, name: &str, value: &str) -> Self {
        self.what = format!("{name}={value} {}", self.what);
        self.environment.push((name.into(), value.into()));
        self
    }

    pub(crate) fn file(mut self, name: &str, content: impl Into<Content>) -> Self {
        self.files.push((name.into(), content.into()));
        self
    }

    /// In a copy of a small model.
    pub(crate) fn model(mut self) -> Self {
        self.is_model = true;
        self
    }

    /// Names the subject of the file, for the report of a failure.
    pub(crate) fn named(mut self, what: &str) -> Self {
        self.what = format!("{what}: {}", self.what);
        self
    }

    /// Forbids these words, although they are no panic.
    pub(crate) fn without(mut self, words: &'static str) -> Self {
        self.without = words;
        self
    }

    /// The exit code for what is no wrong use.
    pub(crate) fn code(mut self, code: i32) -> Self {
        self.code = code;
        self
    }

    /// Returns the fault of the answer, if any.
    fn check(&self) -> Result<(), String> {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path().to_str().expect("a path of text");
        if self.is_model {
            for entry in std::fs::read_dir(fixtures::folder("llama-mha")).expect("a model") {
                let entry = entry.expect("an entry");
                std::os::unix::fs::symlink(entry.path(), folder.path().join(entry.file_name()))
                    .expect("a link");
            }
        }
        for (name, content) in &self.files {
            content.place(&folder.path().join(name));
        }
        let output = folder.path().join("output.of.the.case");
        let file = File::create(&output).expect("a file");
        let program =
            std::env::var_os("CARGO_BIN_EXE_ryz").unwrap_or_else(|| env!("CARGO_BIN_EXE_ryz").into());
        let mut command = Command::new("sh");
        // Variables of the user who runs the tests do not count.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"RYZ_"))
        {
            command.env_remove(name);
        }
        let mut child = command
            .args(["-c", &format!("ulimit -v {ADDRESSES_KIB}; exec \"$0\" \"$@\"")])
            .arg(program)
            .args(self.arguments.iter().map(|argument| argument.replace("{}", here)))
            .envs(self.environment.iter().map(|(name, value)| (name, value.replace("{}", here))))
            // The driver of a GPU reserves more addresses than the limit.
            .env("CUDA_VISIBLE_DEVICES", "")
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("one more"))
            .stderr(file)
            .spawn()
            .expect("started");
        let deadline = Instant::now() + DEADLINE;
        let status = loop {
            if let Some(status) = child.try_wait().expect("waited") {
                break status;
            }
            if Instant::now() > deadline {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("has not ended after {DEADLINE:?}"));
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let said = String::from_utf8_lossy(&std::fs::read(output).expect("read")).into_owned();
        let complaint = if status.code() != Some(self.code) {
            Some(format!("ended with {status}, not with code {}", self.code))
        } else if let Some(word) = ["panicked at", self.without].into_iter().find(|word| said.contains(word))
        {
            Some(format!("said `{word}`"))
        } else if said.len() > LONGEST_OUTPUT {
            Some(format!("said {} bytes", said.len()))
        } else {
            let missing = self.words.iter().find(|word| !said.contains(&word.replace("{}", here)));
            missing.map(|word| format!("did not say `{word}`"))
        };
        let shown: String = said.chars().take(1500).collect();
        complaint.map_or(Ok(()), |complaint| Err(format!("{complaint}; it said: {shown}")))
    }
}

/// Runs all cases, a few at a time, and tells of all that failed.
pub(crate) fn check(cases: &[Case]) {
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(complaint) = case.check() {
                        failures.lock().expect("kept").push(format!("{}\n  {complaint}", case.what));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("kept");
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}
