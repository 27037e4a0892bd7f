//! Messages of the operating system: sockets, files, memory, processes.

use super::Source::{Documented, Provoked};
use super::{Entry, Source};

const CONNECT: Source = Documented("https://man7.org/linux/man-pages/man2/connect.2.html");

pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        id: "address-in-use",
        patterns: &["address already in use"],
        sample: "error: cannot serve metrics at 127.0.0.1:9090: Address already in use (os error 98)",
        source: Provoked,
        cause: "another process listens on this port, perhaps an earlier job that has not ended",
        remedy: "find it with `ss -ltnp`, end it, or choose another port (0 takes a free one)",
        is_plain: false,
    },
    Entry {
        id: "address-not-here",
        patterns: &["cannot assign requested address"],
        sample: "Cannot assign requested address (os error 99)",
        source: Provoked,
        cause: "the program is to listen at an address that this host, or this container, does not have",
        remedy: "list the addresses with `ip -br address`, and name one of them",
        is_plain: false,
    },
    Entry {
        id: "connection-refused",
        patterns: &["connection refused"],
        sample: "Connection refused (os error 111)",
        source: Provoked,
        cause: "the host answers and nothing listens on that port: the other program has not started, has ended, or listens at \
                another address; or a firewall rejects the connection",
        remedy: "run `ss -ltn` on that host, and look for an earlier error of the program that should listen",
        is_plain: false,
    },
    Entry {
        id: "connection-closed",
        patterns: &["connection reset by peer", "broken pipe"],
        sample: "Connection reset by peer (os error 104)",
        source: Documented("https://man7.org/linux/man-pages/man2/recv.2.html"),
        cause: "the process at the other end died or closed the connection, and this error is only an echo of it",
        remedy: "look at that process's own error",
        is_plain: false,
    },
    Entry {
        id: "no-route",
        patterns: &["no route to host", "network is unreachable"],
        sample: "No route to host (os error 113)",
        source: CONNECT,
        cause: "no network leads from this host to that address: the wrong interface or subnet, a host that is down, or a \
                firewall that rejects it",
        remedy: "see `ip route get ADDRESS`; give the address of a network that both hosts have",
        is_plain: false,
    },
    Entry {
        id: "connection-timed-out",
        patterns: &["connection timed out", "operation timed out (os error 110)"],
        sample: "Connection timed out (os error 110)",
        source: CONNECT,
        cause: "nothing answers at that address: a firewall drops the packets, or the host is down",
        remedy: "try `nc -vz HOST PORT` from this host, and open the port in the firewall or security group",
        is_plain: false,
    },
    Entry {
        id: "name-not-known",
        patterns: &[
            "failed to lookup address information",
            "name or service not known",
            "temporary failure in name resolution",
        ],
        sample: "failed to lookup address information: Name or service not known",
        source: Provoked,
        cause: "the host's name is misspelt, or this host's resolver does not know it",
        remedy: "try `getent hosts NAME`; give an IP address instead, or add the name to /etc/hosts",
        is_plain: false,
    },
    Entry {
        id: "too-many-open-files",
        patterns: &["too many open files"],
        sample: "Too many open files (os error 24)",
        source: Provoked,
        cause: "the process has as many open files and sockets as it may have; ranks have a connection to every other rank",
        remedy: "raise the limit where ranks start: `ulimit -n 65536`, or --ulimit nofile=65536 for a container",
        is_plain: false,
    },
    Entry {
        id: "too-many-threads",
        patterns: &["resource temporarily unavailable (os error 11)", "pthread_create failed"],
        sample: "failed to spawn thread: Resource temporarily unavailable (os error 11)",
        source: Provoked,
        cause: "the user or the container has as many processes and threads as it may have, or no memory is left for the stack of \
                one more",
        remedy: "raise the limit: `ulimit -u`, --pids-limit for a container, TasksMax of the systemd unit; see `ulimit -v` too",
        is_plain: false,
    },
    Entry {
        id: "no-memory",
        patterns: &[
            "cannot allocate memory",
            "memory allocation of * bytes failed",
            "memory allocation failed because the memory allocator returned an error",
        ],
        sample: "memory allocation of 1099511627776 bytes failed",
        source: Provoked,
        cause: "the host, the container or a limit of the process leaves no more memory",
        remedy: "see `free -h`, the container's limit and `ulimit -v`; use a smaller model or fewer ranks on this host",
        is_plain: false,
    },
    Entry {
        id: "disk-full",
        patterns: &["no space left on device"],
        sample: "No space left on device (os error 28)",
        source: Provoked,
        cause: "the file system is full, or a quota is",
        remedy: "see `df -h` for the path in the message, and free space there; /dev/shm is shared memory, see --shm-size",
        is_plain: false,
    },
    Entry {
        id: "library-not-found",
        patterns: &["cannot open shared object file"],
        sample: "libnccl.so.2: cannot open shared object file: No such file or directory",
        source: Provoked,
        cause: "the loader does not find a library: it is not installed, or in a folder that is not searched",
        remedy: "find it with `ldconfig -p`; set device.cuda or device.nccl to its path, or add its folder to LD_LIBRARY_PATH",
        is_plain: false,
    },
];
