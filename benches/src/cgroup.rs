//! The limits of this process's cgroup: the minimum over the group and its ancestors.

use std::path::{Path, PathBuf};

/// Returns the CPU quota, in CPUs, and the memory limit, in bytes; `None` without limit.
pub fn limits() -> (Option<f64>, Option<u64>) {
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let least = |controller: &str, limit: &dyn Fn(&Path) -> Option<f64>| {
        let limits = folders(&groups, controller).into_iter().filter_map(|folder| limit(&folder));
        limits.reduce(f64::min)
    };
    let processors = least("cpu", &|folder| {
        read(folder.join("cpu.max")).and_then(|text| cpu_max(&text)).or_else(|| {
            let quota: f64 = read(folder.join("cpu.cfs_quota_us"))?.parse().ok()?;
            let period: f64 = read(folder.join("cpu.cfs_period_us"))?.parse().ok()?;
            (quota > 0.0 && period > 0.0).then_some(quota / period)
        })
    });
    let memory = least("memory", &|folder| {
        let text = read(folder.join("memory.max")).or_else(|| read(folder.join("memory.limit_in_bytes")))?;
        memory_max(&text).map(|bytes| bytes as f64)
    });
    (processors, memory.map(|bytes| bytes as u64))
}

/// Returns the trimmed text of a file in `/proc` or `/sys`; `None` if it cannot be read.
pub fn read(path: impl AsRef<Path>) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Returns the folders of a controller that apply to a process with this `/proc/self/cgroup`, innermost first.
fn folders(groups: &str, controller: &str) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let root = match controllers {
            "" => PathBuf::from("/sys/fs/cgroup"),
            list if list.split(',').any(|name| name == controller) => {
                Path::new("/sys/fs/cgroup").join(controller)
            }
            _ => continue,
        };
        let inside = Path::new(path.trim_start_matches('/'));
        all.extend(inside.ancestors().map(|part| root.join(part)));
    }
    all
}

/// Parses `cpu.max`: `50000 100000` is half a CPU; `max 100000` is no limit.
fn cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.split_once(' ')?;
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0.0).then_some(quota / period)
}

/// Parses a memory limit: `max`, and the number near 2⁶³ that older kernels write, mean no limit.
fn memory_max(text: &str) -> Option<u64> {
    text.parse().ok().filter(|bytes| *bytes < 1 << 62)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_the_kernel_writes_them() {
        assert_eq!(cpu_max("50000 100000"), Some(0.5));
        assert_eq!(cpu_max("max 100000"), None);
        assert_eq!(memory_max("1073741824"), Some(1 << 30));
        assert_eq!(memory_max("max"), None);
        assert_eq!(memory_max("9223372036854771712"), None);
    }

    #[test]
    fn the_folders_of_both_generations_are_found_up_to_the_root() {
        let path = |text: &str| PathBuf::from(text);
        assert_eq!(
            folders("0::/a/b", "cpu"),
            [path("/sys/fs/cgroup/a/b"), path("/sys/fs/cgroup/a"), path("/sys/fs/cgroup/")]
        );
        let old = "5:memory:/x\n3:cpu,cpuacct:/x\n";
        assert_eq!(folders(old, "cpu"), [path("/sys/fs/cgroup/cpu/x"), path("/sys/fs/cgroup/cpu/")]);
    }
}
