//! scratch
use ryzanstein_config::*;
use ryzanstein_process_group::*;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let n: usize = args[1].parse().unwrap();
    let b: usize = args[2].parse().unwrap();
    let loops: usize = args[3].parse().unwrap();
    let mut c = Config::default();
    c.process_group.backend = BackendChoice::Tcp;
    for a in &args[4..] {
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
            let c = &c;
            s.spawn(move || {
                let mut m = ProcessGroupManager::initialize(c, &r).unwrap();
                let mut x = vec![0f32; b / 4];
                let t = std::time::Instant::now();
                for _ in 0..loops {
                    m.world().all_reduce(&mut x, ReduceOp::Sum).unwrap();
                }
                if m.rank().0 == 0 {
                    print!("wall/op {:.1} ms  ", t.elapsed().as_secs_f64() * 1e3 / loops as f64);
                }
                m.finalize().unwrap();
            });
        }
    });
}
