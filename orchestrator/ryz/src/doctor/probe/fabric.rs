//! Installed software for fast networks: programs on the `PATH`, and libraries in the usual folders.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::{names, process};
use crate::doctor::facts::{Fabric, VerbsPort};
use ryzanstein_orchestrator::rendezvous::Environment;

/// Timeout of a program that lists adapters or its version.
const DEADLINE: Duration = Duration::from_secs(10);
/// The folders of libraries that are not in `LD_LIBRARY_PATH`, NVIDIA's package for SHARP included.
const LIBRARIES: [&str; 6] = [
    "/opt/mellanox/sharp/lib",
    "/usr/local/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
];
/// Variables of HPC-X with the folders of SHARP and of NCCL's plugin for it.
const HPC_X: [&str; 2] = ["HPCX_SHARP_DIR", "HPCX_NCCL_RDMA_SHARP_PLUGIN_DIR"];

pub(super) fn probe(environment: &Environment) -> Fabric {
    let folders = |name: &str| std::env::split_paths(environment.get(name).map_or("", String::as_str));
    let hpc_x = HPC_X.iter().filter_map(|name| Some(Path::new(environment.get(*name)?).join("lib")));
    let libraries: Vec<PathBuf> =
        folders("LD_LIBRARY_PATH").chain(hpc_x).chain(LIBRARIES.map(PathBuf::from)).collect();
    let program = |name| folders("PATH").map(|folder| folder.join(name)).find(|file| is_executable(file));
    Fabric {
        verbs: program("ibv_devinfo").map(|file| Ok(verbs_ports(&run(&file, &[])?))),
        write_bandwidth: program("ib_write_bw"),
        ucx: program("ucx_info").map(|file| {
            let text = run(&file, &["-v"])?;
            match ucx_version(&text) {
                Some(version) => Ok(format!("{version}, {}", file.display())),
                None => Err(process::unknown_answer(&text)),
            }
        }),
        sharp: library(&libraries, "libsharp_coll.so"),
        nccl_plugin: library(&libraries, "libnccl-net"),
    }
}

fn is_executable(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

fn run(file: &Path, arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new(file);
    command.args(arguments);
    process::output(command, DEADLINE)
}

/// Returns the first file in these folders whose name starts with `prefix`.
fn library(folders: &[PathBuf], prefix: &str) -> Option<PathBuf> {
    let in_folder = |folder: &PathBuf| {
        let found =
            names(folder).into_iter().find(|name| name.starts_with(prefix) && name.contains(".so"))?;
        Some(folder.join(found))
    };
    folders.iter().find_map(in_folder)
}

/// Parses what `ibv_devinfo` prints: the adapters, below each its ports, below each port its properties.
fn verbs_ports(text: &str) -> Vec<VerbsPort> {
    let (mut adapter, mut ports) = ("", Vec::<VerbsPort>::new());
    for line in text.lines() {
        let Some((key, value)) = line.trim().split_once(':') else { continue };
        // `4096 (5)`
        let value = value.trim();
        let mtu = || value.split(' ').next().and_then(|bytes| bytes.parse().ok());
        match (key, ports.last_mut()) {
            ("hca_id", _) => adapter = value,
            ("port", _) => {
                ports.push(VerbsPort { name: format!("{adapter}:{value}"), ..VerbsPort::default() });
            }
            ("max_mtu", Some(port)) => port.max_mtu = mtu(),
            ("active_mtu", Some(port)) => port.active_mtu = mtu(),
            _ => {}
        }
    }
    ports
}

/// Finds the version in what `ucx_info -v` prints: `# Library version: 1.17.0`, before UCX 1.13 `# UCT version=1.8.0 …`.
fn ucx_version(text: &str) -> Option<&str> {
    let (_, rest) = text
        .lines()
        .find_map(|line| line.split_once("Library version: ").or_else(|| line.split_once("UCT version=")))?;
    rest.split_ascii_whitespace().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVINFO: &str = "hca_id:\tmlx5_0
\ttransport:\t\t\tInfiniBand (0)
\tfw_ver:\t\t\t\t28.39.1002
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t1024 (3)
\t\t\tlink_layer:\t\tEthernet

hca_id:\tmlx5_1
\tphys_port_cnt:\t\t\t2
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_DOWN (1)
\t\tport:\t2
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t4096 (5)
";

    fn write(file: &Path, text: &str, mode: u32) {
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("made");
        std::fs::write(file, text).expect("written");
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).expect("allowed");
    }

    #[test]
    fn programs_and_libraries_are_found_where_the_environment_says() {
        let folder = tempfile::tempdir().expect("a folder");
        let bin = folder.path().join("bin");
        write(&bin.join("ibv_devinfo"), &format!("#!/bin/sh\ncat <<'E'\n{DEVINFO}E\n"), 0o755);
        write(&bin.join("ucx_info"), "#!/bin/sh\n[ $1 = -v ] && echo '# Library version: 1.17.0'\n", 0o755);
        // It would connect to nobody: it must not be started, and need not be.
        write(&bin.join("ib_write_bw"), "#!/bin/sh\ntouch \"$0.started\"\n", 0o755);
        write(&folder.path().join("lib/libsharp_coll.so.5"), "", 0o644);
        write(&folder.path().join("hpcx/lib/libnccl-net.so"), "", 0o644);
        let text = |path: &Path| path.to_str().expect("text").to_owned();
        let environment = Environment::from([
            ("PATH".into(), format!("/nowhere:{}:/bin:/usr/bin", text(&bin))),
            ("LD_LIBRARY_PATH".into(), text(&folder.path().join("lib"))),
            ("HPCX_NCCL_RDMA_SHARP_PLUGIN_DIR".into(), text(&folder.path().join("hpcx"))),
        ]);
        let found = probe(&environment);
        let ports = found.verbs.expect("installed").expect("it runs");
        let ports: Vec<_> = ports.iter().map(|p| (p.name.as_str(), p.active_mtu, p.max_mtu)).collect();
        assert_eq!(
            ports,
            [
                ("mlx5_0:1", Some(1024), Some(4096)),
                ("mlx5_1:1", None, None),
                ("mlx5_1:2", Some(4096), Some(4096))
            ]
        );
        assert_eq!(
            found.ucx.expect("installed").expect("it runs"),
            format!("1.17.0, {}/ucx_info", text(&bin))
        );
        assert_eq!(found.write_bandwidth, Some(bin.join("ib_write_bw")));
        assert!(!bin.join("ib_write_bw.started").exists());
        assert_eq!(found.sharp, Some(folder.path().join("lib/libsharp_coll.so.5")));
        assert_eq!(found.nccl_plugin, Some(folder.path().join("hpcx/lib/libnccl-net.so")));
    }

    #[test]
    fn what_is_not_installed_is_absent_and_what_fails_is_quoted() {
        let folder = tempfile::tempdir().expect("a folder");
        write(
            &folder.path().join("ibv_devinfo"),
            "#!/bin/sh\necho 'No IB devices found' >&2; exit 1\n",
            0o755,
        );
        write(&folder.path().join("ucx_info"), "#!/bin/sh\necho nonsense\n", 0o755);
        // Not executable.
        write(&folder.path().join("ib_write_bw"), "", 0o644);
        let path = format!("{}", folder.path().display());
        let found = probe(&Environment::from([("PATH".into(), path)]));
        let why = found.verbs.expect("installed").expect_err("it fails");
        assert!(why.contains("No IB devices found"), "{why}");
        assert!(found.ucx.expect("installed").expect_err("no version").contains("nonsense"));
        assert_eq!(found.write_bandwidth, None);
        let found = probe(&Environment::new());
        assert!(found.verbs.is_none() && found.write_bandwidth.is_none() && found.ucx.is_none());
    }

    #[test]
    fn the_version_of_ucx_is_found_in_its_old_and_its_new_form() {
        assert_eq!(ucx_version("# Library version: 1.17.0\n# Library path: /usr\n"), Some("1.17.0"));
        assert_eq!(ucx_version("# UCT version=1.8.0 revision c30b7da\n"), Some("1.8.0"));
        assert_eq!(ucx_version("no version"), None);
    }
}
