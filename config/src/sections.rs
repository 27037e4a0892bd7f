//! The sections. Fields, defaults and descriptions are each written once.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use crate::{
    BackendChoice, BindChoice, ByteSize, EncryptionChoice, Fraction, HostPort, InstructionSet,
    LauncherChoice, LogFormat, MessageSize, ModelDType, NcclEnv, NcclProfile, Numerics, RecordedCalls,
    ShownRanks, Temperature, Timeout, TuningChoice, ValueError, WorldSize,
};

/// A section of settings, for loading and display.
pub(crate) trait Section {
    /// Returns the values as text, in the order of the keys in `INFO`.
    fn values(&self) -> Vec<String>;

    /// Parses `text` into the setting with this dotted key. Returns `None` if the key is not in this section.
    fn set(&mut self, key: &str, text: &str) -> Option<Result<(), ValueError>>;
}

/// Generates from one list of `field: Type = "default"`: the struct, its `Default`, and its rows of the key table.
///
/// Defaults are text in the users' syntax, so the documentation shows exactly the text that is parsed.
macro_rules! section {
    (
        $(#[doc = $section_doc:literal])+
        $type:ident = $name:literal {
            $( $(#[doc = $doc:literal])+ $field:ident: $kind:ty = $default:literal, )+
            $( [ $(#[doc = $inner_doc:literal])+ $inner:ident: $inner_type:ty ] )?
        }
    ) => {
        $(#[doc = $section_doc])+
        #[derive(Clone, Debug, PartialEq)]
        pub struct $type {
            $(
                $(#[doc = $doc])+
                #[doc = concat!("\n\nDefault: `\"", $default, "\"`.")]
                pub $field: $kind,
            )+
            $( $(#[doc = $inner_doc])+ pub $inner: $inner_type, )?
        }

        impl Default for $type {
            fn default() -> Self {
                Self {
                    $( $field: crate::setting::built_in($default), )+
                    $( $inner: <$inner_type>::default(), )?
                }
            }
        }

        impl $type {
            pub(crate) const INFO: crate::SectionInfo = crate::SectionInfo {
                name: $name,
                doc: concat!($($section_doc),+).trim_ascii(),
                keys: &[$(crate::KeyInfo {
                    key: concat!($name, ".", stringify!($field)),
                    default: $default,
                    doc: concat!($($doc),+).trim_ascii(),
                    expected: <$kind as crate::setting::Setting>::EXPECTED,
                    example: <$kind as crate::setting::Setting>::EXAMPLE,
                    is_table: <$kind as crate::setting::Setting>::IS_TABLE,
                }),+],
            };
        }

        impl Section for $type {
            fn values(&self) -> Vec<String> {
                vec![$(crate::setting::Setting::show(&self.$field)),+]
            }

            fn set(&mut self, key: &str, text: &str) -> Option<Result<(), ValueError>> {
                match key {
                    $(concat!($name, ".", stringify!($field)) => {
                        Some(crate::setting::Setting::parse(text).map(|value| self.$field = value))
                    })+
                    _ => None,
                }
            }
        }
    };
}

section! {
    /// The job as a whole.
    JobConfig = "job" {
        /// The number of ranks on all nodes together. `ryz launch` needs it; a process without a launcher is one rank when it
        /// is unset.
        world_size: Option<WorldSize> = "",
        /// The name of the job, shown in the report of `ryz check`.
        name: String = "ryzanstein",
    }
}

section! {
    /// Start and end of the processes of a job.
    LaunchConfig = "launch" {
        /// The number of nodes.
        nnodes: NonZeroU32 = "1",
        /// The rank of this node, from 0; less than `launch.nnodes`.
        node_rank: u32 = "0",
        /// The maximum number of restarts of the job after failures, each in a new epoch. After an epoch of five minutes or more,
        /// the count starts again.
        max_restarts: u32 = "0",
        /// The folder for each rank's output, in `rank-R/stdout.log` and `stderr.log`; unset, output is only forwarded.
        log_dir: Option<PathBuf> = "",
        /// The ranks whose output is shown: `all`, `none`, or ranks separated by commas. `launch.log_dir` still receives the output
        /// of every rank.
        show_ranks: ShownRanks = "all",
        /// The binding of ranks to processors: `auto` divides those of the launcher among the ranks of this node if there are enough.
        bind: BindChoice = "auto",
        /// The time that ranks have to exit after a signal, before SIGKILL.
        grace: Duration = "4s",
    }
}

section! {
    /// The rendezvous, where the ranks join the job.
    RendezvousConfig = "rendezvous" {
        /// The address of the rendezvous, HOST:PORT, the same on every node; on a single node, port 0 takes any free port.
        address: Option<HostPort> = "",
        /// The local address on which the rendezvous listens; unset, that of `rendezvous.address`.
        bind: Option<IpAddr> = "",
        /// The launcher whose variables give the rank of a process that `ryz launch` did not start; auto: any launcher that has
        /// set variables.
        launcher: LauncherChoice = "auto",
        /// The maximum time to wait for all ranks to join.
        timeout: Timeout = "1m",
        /// The time limit for a new connection to authenticate, to the rendezvous or between ranks.
        handshake_timeout: Timeout = "5s",
        /// The maximum size of a message.
        max_message: MessageSize = "1MiB",
        /// The maximum number of connections.
        max_connections: NonZeroU32 = "16384",
    }
}

section! {
    /// Protection of the connections between the processes of a job, in addition to the proof of the job's secret. The same on
    /// every node.
    SecurityConfig = "security" {
        /// The encryption of connections: on, off, or auto, which encrypts all except those to loopback addresses and through
        /// Unix sockets.
        encryption: EncryptionChoice = "auto",
    }
}

section! {
    /// The CPU data plane.
    TcpConfig = "process_group.tcp" {
        /// The network interface whose address is announced to peers, such as `eth0`; unset, the one that reaches the rendezvous.
        interface: Option<String> = "",
        /// The local address on which peers connect; overrides `process_group.tcp.interface`.
        bind: Option<IpAddr> = "",
        /// The algorithm on CPUs, for every operation that has it: auto, or a name such as `ring`.
        algorithm: String = "auto",
        /// Exchange data between ranks of one host through shared memory, where the system allows it, instead of sockets.
        shared_memory: bool = "true",
        /// The time to poll for data from other ranks before sleeping: lower latency at the price of a busy core; 0s never polls.
        spin: Duration = "50us",
    }
}

section! {
    /// Collectives between ranks.
    ProcessGroupConfig = "process_group" {
        /// The implementation of the collectives.
        backend: BackendChoice = "auto",
        /// The deadline of every collective; the group fails when it passes.
        timeout: Timeout = "5m",
        /// Check the results of every path before the group is used.
        self_check: bool = "true",
        /// The size of the bucket in which `all_reduce_coalesced` packs small arrays. 0B turns packing off. GPUs never pack.
        coalesce: ByteSize = "25MiB",
        /// For GPUs of one node that NVLink connects: use our own kernels, which access the memory of peers, for all-reduces,
        /// all-gathers, reduce-scatters and broadcasts, where they are faster than NCCL; `ryz tune` checks that on this machine.
        peer_memory: bool = "true",
        /// The measured table of paths: a file of `ryz tune`; auto: the table that `ryz tune --apply` wrote, if it exists and
        /// fits this machine; off: none. The value of rank 0 applies to all ranks.
        tuning: TuningChoice = "auto",
        [
            /// `[process_group.tcp]`
            tcp: TcpConfig
        ]
    }
}

section! {
    /// The GPU of a rank, and the libraries for it.
    DeviceConfig = "device" {
        /// The fraction of the GPU's memory that this rank may allocate; an allocation beyond it fails.
        memory_fraction: Fraction = "0.9",
        /// The driver library `libcuda.so.1`, or its folder; unset, the dynamic loader finds it.
        cuda: Option<PathBuf> = "",
        /// NCCL, `libnccl.so.2` of 2.18 or newer, or its folder; unset, the dynamic loader, then Python environments and
        /// CUDA toolkits are searched.
        nccl: Option<PathBuf> = "",
        /// The run-time compiler `libnvrtc.so.13` or `.12`, or its folder; unset, as for NCCL.
        nvrtc: Option<PathBuf> = "",
        /// The matrix library `libcublasLt.so.13` or `.12`, or its folder; unset, as for NCCL.
        cublaslt: Option<PathBuf> = "",
        /// The folder for compiled kernels; unset, `ryzanstein/kernels` in the user's cache folder.
        kernel_cache: Option<PathBuf> = "",
    }
}

section! {
    /// Settings for NCCL, passed in its own variables before it is loaded. A `NCCL_…` variable that the user has set overrides
    /// everything here; `env` overrides the profile; NCCL chooses values that are unset.
    NcclConfig = "nccl" {
        /// A named set of variables.
        profile: NcclProfile = "none",
        /// NCCL's own variables, passed on as they are. In the file, the table `[nccl.env]`.
        env: NcclEnv = "",
    }
}

section! {
    /// The degrees of parallelism. The product of the three is the world size.
    LayoutConfig = "layout" {
        /// Number of ranks that share each layer; unset, the world size divided by the other two.
        tensor_parallel: Option<NonZeroU32> = "",
        /// Number of stages that the layers are divided into.
        pipeline_parallel: NonZeroU32 = "1",
        /// Number of replicas of the model.
        data_parallel: NonZeroU32 = "1",
    }
}

section! {
    /// Measurement while a job runs.
    ProfileConfig = "profile" {
        /// Record the latency and bandwidth of calls.
        enabled: bool = "true",
        /// Also time calls inside a captured CUDA graph, one in 64 of each kind, where a replay ends before the next starts. Each timed
        /// call makes a replay some 20 µs longer.
        graphs: bool = "false",
        /// A call is logged if it takes longer than this plus the time that its bytes need at 0.1 GB/s on CPUs or 10 GB/s on GPUs.
        /// Over TCP, waiting for other ranks does not count. `ryz check`, `ryz bench`, `ryz tune` and `ryz generate` log
        /// only if it is set.
        slow_call: Duration = "10ms",
        /// The minimum time between two such log lines.
        slow_call_every: Duration = "10s",
        /// The number of calls that the flight recorder keeps in each group, the newest ones, at 80 bytes each; 0 turns it off.
        /// Then the launcher cannot see which call each rank is in, and never reports *no progress*.
        recorder: RecordedCalls = "2048",
        /// The folder in which a rank writes its flight record, `rank-R.json`, when a group fails, or when a `ryz` command that
        /// is a rank receives SIGUSR1; unset, none is written. `ryz trace` reads it.
        trace_dir: Option<PathBuf> = "",
    }
}

section! {
    /// Filter and format of log lines.
    LogConfig = "log" {
        /// The filter: a level, or levels by module as in `info,ryzanstein_process_group=debug`.
        level: String = "info",
        /// The format of log lines.
        format: LogFormat = "text",
    }
}

section! {
    /// Metrics in Prometheus format.
    MetricsConfig = "metrics" {
        /// The address at which metrics are served; unset, none are served.
        address: Option<SocketAddr> = "",
        /// The address at which `ryz launch` serves its own metrics, such as restarts; unset, none are served.
        launcher_address: Option<SocketAddr> = "",
    }
}

section! {
    /// Spans sent to an OpenTelemetry collector, by the protocol OTLP over gRPC.
    OtlpConfig = "otlp" {
        /// The collector, such as `http://127.0.0.1:4317`; unset, the standard variable `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or
        /// `OTEL_EXPORTER_OTLP_ENDPOINT`, and without those no spans are sent.
        endpoint: Option<String> = "",
        /// The filter of spans, written as `log.level`: `info` sends the phases of a job, `debug` also every collective.
        level: String = "info",
    }
}

section! {
    /// The model that `ryz generate` runs, and its sampling.
    ModelConfig = "model" {
        /// The folder of the checkpoint, in Hugging Face format.
        directory: Option<PathBuf> = "",
        /// The type of activations; unset, that of the stored matrices, or f32 if they differ.
        dtype: Option<ModelDType> = "",
        /// The maximum number of generated tokens.
        max_new_tokens: u32 = "32",
        /// The sampling temperature; 0 always selects the most likely token.
        temperature: Temperature = "0",
        /// Nucleus sampling: sample from the most likely tokens that together have this probability.
        top_p: Fraction = "1",
        /// Sample from the K most likely tokens only; 0 means all.
        top_k: u32 = "0",
        /// The seed for sampling.
        seed: u64 = "0",
        /// On CPUs: the instruction set of matrix products, chosen once per process; unset, the fastest that the processor has.
        /// All ranks of a model must use the same.
        instruction_set: Option<InstructionSet> = "",
        /// `invariant`: the same bits with every legal number of ranks, batch and chunking. All ranks of a model must use the same.
        numerics: Numerics = "fast",
        /// On a GPU: capture the pass of one token in a CUDA graph and replay it, instead of launching every operation.
        graph: bool = "true",
    }
}
