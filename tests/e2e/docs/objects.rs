//! Validates the objects of pages and examples on a real API server.

use anyhow::Context as _;

use crate::harness::Cluster;
use crate::page::{pages, repository};

/// Validates every object of blocks with this mark by a strict dry run.
async fn check(cluster: &Cluster, mark: &str) -> anyhow::Result<usize> {
    let mut accepted = 0;
    for block in pages().into_iter().flat_map(|page| page.blocks) {
        if block.language != "yaml" || block.mark != mark {
            continue;
        }
        let file = cluster.directory().join("object.yaml");
        std::fs::write(&file, &block.text)?;
        let file = file.to_str().context("UTF-8")?;
        let message = cluster
            .kubectl(&[
                "create",
                "--dry-run=server",
                "--validate=strict",
                "--filename",
                file,
            ])
            .await
            .with_context(|| block.place.clone())?;
        accepted += message.lines().filter(|line| line.contains("created")).count();
    }
    println!("{accepted} objects accepted");
    Ok(accepted)
}

#[tokio::test]
async fn the_api_server_accepts_every_object_of_classic_mode() -> anyhow::Result<()> {
    let cluster = Cluster::builder().start().await?;
    let definitions = repository("charts/drayman/crds");
    let definitions = definitions.to_str().context("UTF-8")?;
    cluster
        .kubectl(&["apply", "--server-side", "--filename", definitions])
        .await?;
    cluster
        .kubectl(&[
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            "--filename",
            definitions,
        ])
        .await?;
    let accepted = check(&cluster, "object").await?;
    assert!(accepted >= 6, "{accepted}");
    cluster.stop().await
}

#[tokio::test]
async fn the_api_server_accepts_every_object_of_structured_mode() -> anyhow::Result<()> {
    let cluster = Cluster::structured().start().await?;
    let accepted = check(&cluster, "v1").await?;
    assert!(accepted >= 4, "{accepted}");
    cluster.stop().await
}
