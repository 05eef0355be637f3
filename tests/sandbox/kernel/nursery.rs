//! Interpreters that are cast from a mould.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use exuvia::sandbox::kernel::{RunOptions, Language, Warm, WarmOptions, mould};

use super::{Place, finish};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interpreter_is_cast() {
    let test = "kernel::nursery::an_interpreter_is_cast";
    let Some(place) = Place::open(test).await else {
        return;
    };
    let mould = Arc::new(mould(&place.sandbox, BTreeMap::new()).await.unwrap());
    eprintln!("mould of {} KiB", mould.bytes() >> 10);
    place.close().await;
    let place = Place::open(test).await.unwrap();
    for round in 0..10 {
        let began = Instant::now();
        let warm = Warm::start(&place.sandbox, Language::Python, WarmOptions { mould: Some(mould.clone()), ..WarmOptions::default() }).await.unwrap();
        let up = began.elapsed();
        let began = Instant::now();
        let did = finish(warm.run("print(6*7); import os\nfor l in open('/proc/self/status'): print(l, end='')\nprint(open('/proc/self/smaps_rollup').read())", RunOptions::default()).unwrap()).await;
        eprintln!("{up:?} {:?} {}", began.elapsed(), if round == 9 { did.out() } else { String::new() });
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    place.close().await;
}
