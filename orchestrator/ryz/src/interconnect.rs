//! Interconnects with their published figures.

use std::fmt;
use std::str::FromStr;

use ryzanstein_process_group::schedule::cost::LinkCost;

/// A kind of link between ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Interconnect {
    /// The name in flags and tables.
    pub name: &'static str,
    /// The published bandwidth of one direction in GB/s (10⁹ bytes per second), before protocol overhead.
    pub gbs: f64,
    /// Seconds of a step that moves nothing. For NVLink, PCI Express and InfiniBand, these are NCCL's own constants of a step of a
    /// ring with the protocol LL (`hwLatencies` in `src/graph/tuning.cc` of NCCL). For Ethernet, it is an assumption: a message of
    /// TCP through two kernels and a switch.
    pub latency: f64,
}

/// A name that is not an interconnect.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is no interconnect `{name}`; there are {}", Interconnect::ALL.map(|one| one.name).join(", "))]
pub struct UnknownInterconnect {
    /// The name.
    pub name: String,
}

const fn nvlink(name: &'static str, gbs: f64) -> Interconnect {
    Interconnect { name, gbs, latency: 0.6e-6 }
}

/// Returns 16 lanes, from the giga-transfers of a lane, of which 128 of 130 bits are data.
const fn pcie(name: &'static str, transfers: f64) -> Interconnect {
    Interconnect { name, gbs: transfers * 16.0 / 8.0 * 128.0 / 130.0, latency: 1.0e-6 }
}

/// Returns 4 lanes (InfiniBand Trade Association, InfiniBand Roadmap).
const fn infiniband(name: &'static str, gbs: f64) -> Interconnect {
    Interconnect { name, gbs, latency: 2.7e-6 }
}

const fn ethernet(name: &'static str, gbs: f64) -> Interconnect {
    Interconnect { name, gbs, latency: 25e-6 }
}

impl Interconnect {
    /// NVLink 4 of an H100 or H200: 18 links of 25 GB/s; both directions together are the 900 GB/s of NVIDIA's "H100 Tensor Core GPU
    /// Architecture" whitepaper.
    pub const NVLINK4: Self = nvlink("nvlink4", 450.0);

    /// All interconnects.
    pub const ALL: [Self; 12] = [
        // PCI-SIG, PCI Express Base Specification 3.0, 4.0 and 5.0.
        pcie("pcie3", 8.0),
        pcie("pcie4", 16.0),
        pcie("pcie5", 32.0),
        // 6 links of 25 GB/s: NVIDIA, "Tesla V100 GPU Architecture".
        nvlink("nvlink2", 150.0),
        // 12 links of 25 GB/s: NVIDIA, "A100 Tensor Core GPU Architecture".
        nvlink("nvlink3", 300.0),
        Self::NVLINK4,
        // 18 links of 50 GB/s of a B200, and of GB200 NVL72, whose switches join 72 GPUs of 18 hosts: NVIDIA, "Blackwell
        // Architecture Technical Brief".
        nvlink("nvlink5", 900.0),
        infiniband("hdr", 25.0),
        infiniband("ndr", 50.0),
        // IEEE 802.3ae, 802.3by and 802.3ba.
        ethernet("10gbe", 1.25),
        ethernet("25gbe", 3.125),
        ethernet("100gbe", 12.5),
    ];

    /// Returns latency and bandwidth, for the cost model.
    pub const fn cost(self) -> LinkCost {
        LinkCost { latency: self.latency, message: 0.0, byte: 1e-9 / self.gbs }
    }
}

impl fmt::Display for Interconnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

impl FromStr for Interconnect {
    type Err = UnknownInterconnect;

    fn from_str(name: &str) -> Result<Self, UnknownInterconnect> {
        let known = Self::ALL.into_iter().find(|interconnect| interconnect.name == name);
        known.ok_or_else(|| UnknownInterconnect { name: name.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_interconnect_is_found_by_its_name() {
        for interconnect in Interconnect::ALL {
            assert_eq!(interconnect.name.parse(), Ok(interconnect));
            assert_eq!(interconnect.to_string(), interconnect.name);
        }
        let error = "token ring".parse::<Interconnect>().unwrap_err().to_string();
        assert!(error.contains("`token ring`") && error.contains("nvlink4"), "{error}");
        assert!((Interconnect::ALL[1].gbs - 31.508).abs() < 0.01);
    }
}
