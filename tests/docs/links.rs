//! Links have existing targets, and every page of the book is in its table of contents.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use crate::page::{page, pages, repository};

/// Normalizes a path: `docs/../hack/a` is `hack/a`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => assert!(normal.pop(), "{} leads out of the repository", path.display()),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

#[test]
fn every_link_leads_to_an_existing_file_and_heading() {
    let (mut followed, mut dead) = (0, Vec::new());
    for from in pages() {
        for link in &from.links {
            if link.target.contains("://") {
                continue;
            }
            followed += 1;
            let (path, anchor) = link.target.split_once('#').unwrap_or((&link.target, ""));
            let directory = from.path.parent().unwrap_or_else(|| Path::new(""));
            let path = if path.is_empty() {
                from.path.clone()
            } else {
                normal(&directory.join(path))
            };
            let found = repository(&path).exists()
                && (anchor.is_empty()
                    || path.extension().is_some_and(|extension| extension == "md")
                        && page(path.to_str().expect("UTF-8")).anchors.contains(anchor));
            if !found {
                dead.push(format!("{}: {}", link.place, link.target));
            }
        }
    }
    assert!(dead.is_empty(), "dead links:\n  {}", dead.join("\n  "));
    assert!(followed > 40, "{followed} links were found");
}

#[test]
fn every_page_of_the_book_is_once_in_its_table_of_contents() {
    let contents = page("docs/SUMMARY.md");
    let mut listed: Vec<PathBuf> = contents
        .links
        .iter()
        .map(|link| Path::new("docs").join(&link.target))
        .collect();
    listed.sort();
    let unique: BTreeSet<&PathBuf> = listed.iter().collect();
    assert_eq!(unique.len(), listed.len(), "listed twice: {listed:?}");
    let book: Vec<PathBuf> = pages()
        .into_iter()
        .map(|page| page.path)
        .filter(|path| path.starts_with("docs") && !path.ends_with("SUMMARY.md"))
        .collect();
    assert_eq!(listed, book);
}
