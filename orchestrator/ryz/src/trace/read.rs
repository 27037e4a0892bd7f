//! Reads the files of a folder.

use std::path::Path;

use anyhow::{Context as _, bail};
use ryzanstein_config::file::{self, FileError};
use ryzanstein_config::{ByteSize, WorldSize};
use ryzanstein_process_group::FlightRecord;

/// Upper bound of the size of a file: the largest recorder of a rank with a dozen groups writes less.
const LARGEST_FILE: ByteSize = ByteSize::mib(4096);

/// The flight records of a folder.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Files {
    /// The records of one job, the newest in the folder, one for each rank, in rank order.
    pub records: Vec<FlightRecord>,
    /// The other files, and the reasons why they do not count.
    pub ignored: Vec<String>,
}

/// Reads every `rank-R.json` of a folder.
///
/// # Errors
/// Returns an error if the folder cannot be read or contains no record. A file that is not a record is no error.
pub fn read(folder: &Path) -> anyhow::Result<Files> {
    let failed = || format!("cannot read the folder {}", folder.display());
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(failed)? {
        let name = entry.with_context(failed)?.file_name().to_string_lossy().into_owned();
        if name.starts_with("rank-") && Path::new(&name).extension().is_some_and(|end| end == "json") {
            names.push(name);
        }
    }
    names.sort();
    let parsed = names.into_iter().map(|name| {
        let record = parse(&folder.join(&name));
        (name, record)
    });
    let files = Files::of_one_job(parsed);
    if files.records.is_empty() {
        let ignored = files.ignored.iter().fold(String::new(), |text, why| text + "; ignored " + why);
        bail!(
            "there is no flight record in {}: expected files rank-R.json, which ranks write when a group fails or a `ryz` \
             command gets SIGUSR1; start the job with `ryz launch --trace-dir DIR`{ignored}",
            folder.display()
        );
    }
    Ok(files)
}

fn parse(path: &Path) -> Result<FlightRecord, String> {
    let bytes = file::read(path, LARGEST_FILE).map_err(|error: FileError| error.to_string())?;
    let record: FlightRecord =
        serde_json::from_slice(&bytes).map_err(|error| format!("it is no flight record: {error}"))?;
    let ranks = u32::try_from(record.world_size).ok().and_then(|ranks| WorldSize::new(ranks).ok());
    match ranks {
        Some(ranks) if record.rank.0 < ranks.get() => Ok(record),
        _ => Err(format!("it is of rank {} in a job of {} ranks", record.rank, record.world_size)),
    }
}

impl Files {
    /// Keeps the records of the same job as the newest record.
    fn of_one_job(files: impl IntoIterator<Item = (String, Result<FlightRecord, String>)>) -> Self {
        let (mut records, mut ignored) = (Vec::new(), Vec::new());
        for (name, file) in files {
            match file {
                Ok(record) => records.push((name, record)),
                Err(why) => ignored.push(format!("{name}: {why}")),
            }
        }
        records.sort_by_key(|(_, record)| (record.rank, std::cmp::Reverse(record.dumped_ns)));
        let newest = records.iter().max_by_key(|(_, record)| record.dumped_ns);
        let job = newest.map(|(_, record)| record.job.clone()).unwrap_or_default();
        let mut kept: Vec<FlightRecord> = Vec::new();
        for (name, record) in records {
            if record.job != job {
                ignored.push(format!("{name}: it is of another job, {}", record.job));
            } else if kept.last().is_some_and(|last| last.rank == record.rank) {
                ignored.push(format!("{name}: there is a newer record of rank {}", record.rank));
            } else {
                kept.push(record);
            }
        }
        Self { records: kept, ignored }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::tests::record;

    #[test]
    fn only_the_newest_job_of_a_folder_counts() {
        let old = FlightRecord { job: "older".into(), dumped_ns: 5, ..record(0, 3) };
        let named = |name: &str, record| (name.to_owned(), Ok(record));
        let newer = FlightRecord { dumped_ns: 9, ..record(1, 3) };
        let files = Files::of_one_job([
            named("rank-0.json", old),
            named("rank-1.json", newer.clone()),
            named("rank-1-copy.json", FlightRecord { dumped_ns: 8, ..newer.clone() }),
            ("rank-2.json".into(), Err("it is no flight record".into())),
        ]);
        assert_eq!(files.records, [newer]);
        assert_eq!(
            files.ignored,
            [
                "rank-2.json: it is no flight record",
                "rank-0.json: it is of another job, older",
                "rank-1-copy.json: there is a newer record of rank 1"
            ]
        );
    }

    #[test]
    fn a_folder_without_records_is_refused_with_what_was_looked_at() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("rank-0.json"), "{}").unwrap();
        std::fs::write(folder.path().join("rank-7.json"), serde_json::to_vec(&record(7, 4)).unwrap())
            .unwrap();
        let error = read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("ryz launch --trace-dir"), "{error}");
        assert!(error.contains("ignored rank-0.json: it is no flight record: missing field"), "{error}");
        assert!(error.contains("ignored rank-7.json: it is of rank 7 in a job of 4 ranks"), "{error}");
        let error = read(&folder.path().join("none")).unwrap_err().to_string();
        assert!(error.contains("cannot read the folder"), "{error}");
    }
}
