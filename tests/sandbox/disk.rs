//! What a program meets when its disk is full.

use exuvia::sandbox::disk::{Kind, Quota, Volumes};
use exuvia::workdir::WorkDir;

use crate::support::{Bench, run, sh};

#[tokio::test]
async fn a_full_disk_is_an_error_of_the_program_and_of_nobody_else() {
    let Some(bench) = Bench::new("a_full_disk_is_an_error_of_the_program_and_of_nobody_else") else {
        return;
    };
    let volumes = Volumes::new(bench.data.path());
    for (kind, lack) in volumes.kinds() {
        if let Err(lack) = lack {
            eprintln!("not with `{kind}`: {lack}");
            continue;
        }
        let mut spec = bench.spec();
        spec.limits.disk = Some(Quota {
            bytes: 24 << 20,
            inodes: 1000,
        });
        spec.limits.disk_kind = Some(kind);
        let owner = spec.identity.host_uid();
        let dir = WorkDir::open(bench.data.path(), spec.id.as_str(), &volumes, &spec.limits, owner).unwrap();
        spec.workspace = Some(dir.workspace());
        let sandbox = bench.open(spec.clone()).await;

        let full = run(&sandbox, "cat /dev/zero > /workspace/big").await;
        assert!(!full.ended.is_success(), "{kind}");
        let said = full.stderr.text();
        assert!(
            said.contains("No space left on device") || said.contains("quota"),
            "{kind}: {said}"
        );
        // It goes on, and the rest of the sandbox never noticed.
        assert_eq!(
            sh(
                &sandbox,
                "rm /workspace/big && echo more > /workspace/a && cat /workspace/a"
            )
            .await,
            "more\n"
        );
        let many =
            "cd /workspace; n=0; while (: > f$n) 2>/dev/null; do n=$((n + 1)); [ $n -lt 2000 ] || break; done; echo $n";
        let made: u32 = sh(&sandbox, many).await.trim().parse().unwrap();
        assert!((800..1000).contains(&made), "{kind}: {made}");
        // Nothing of the host shows in it, and nothing that it did not ask for.
        let mounts = sh(
            &sandbox,
            "grep ' /workspace ' /proc/self/mountinfo; ls -A /workspace | grep -v '^f' | sort",
        )
        .await;
        assert!(mounts.ends_with("\na\n"), "{mounts}");
        match kind {
            Kind::Image | Kind::Tmpfs => {
                assert!(mounts.contains(" /workspace /workspace rw,nosuid,nodev"), "{mounts}");
                assert!(!mounts.contains(bench.data.path().to_str().unwrap()), "{mounts}");
            }
            Kind::Project => {}
        }
        sandbox.close(std::time::Duration::ZERO).await.unwrap();
        dir.remove();
        assert_eq!(bench.traces(&spec.id), Vec::<String>::new(), "{kind}");
    }
}
