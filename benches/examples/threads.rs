//! scratch
use ryzanstein_benches::measure::*;
use ryzanstein_config::*;
use ryzanstein_process_group::*;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let n: usize = args[1].parse().unwrap();
    let sizes: Vec<usize> = args[2].split(',').map(|s| s.parse().unwrap()).collect();
    let mut c = Config::default();
    c.process_group.backend = BackendChoice::Tcp;
    for a in &args[3..] {
        let (k, v) = a.split_once('=').unwrap();
        match k {
            "alg" => c.process_group.tcp.algorithm = v.parse().unwrap(),
            "buf" => c.process_group.tcp.socket_buffer = Some(v.parse().unwrap()),
            "seg" => c.process_group.tcp.segment = v.parse().unwrap(),
            "spin" => c.process_group.tcp.spin = std::time::Duration::from_micros(v.parse().unwrap()),
            _ => panic!(),
        }
    }
    std::thread::scope(|s| {
        for r in MemoryRendezvous::new(n) {
            let (c, sizes) = (&c, &sizes);
            s.spawn(move || {
                let mut m = ProcessGroupManager::initialize(c, &r).unwrap();
                for &b in sizes {
                    let row = measure(m.world(), b).unwrap();
                    if m.rank().0 == 0 {
                        println!(
                            "{n} {b:>10}: {:>9.1} p99 {:>9.1} b2b {:>9.1} bc {:>9.1} err {}",
                            row.median_us, row.p99_us, row.back_to_back_us, row.broadcast_us, row.errors
                        );
                    }
                }
                m.finalize().unwrap();
            });
        }
    });
}
