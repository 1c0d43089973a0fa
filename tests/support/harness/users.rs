//! Users: every program under test runs as its own user with exactly the given rights.

use std::path::PathBuf;

use anyhow::{Context, bail};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, RoleRef, Subject};
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use tokio::time::{Duration, Instant, sleep};

use super::supervisor::Request;
use super::{Cluster, TIMEOUT, shared};

/// An RBAC rule: these verbs on these resources of these API groups.
pub fn rule(groups: &[&str], resources: &[&str], verbs: &[&str]) -> PolicyRule {
    let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
    PolicyRule {
        api_groups: Some(owned(groups)),
        resources: Some(owned(resources)),
        verbs: owned(verbs),
        ..PolicyRule::default()
    }
}

impl Cluster {
    /// Creates a user with exactly these cluster-wide rights, and returns the user's kubeconfig. The audit log contains the name. Another
    /// call for the same user replaces the rights.
    pub async fn user(&self, name: &str, rules: &[PolicyRule]) -> anyhow::Result<PathBuf> {
        let kubeconfig = if self.is_shared() {
            shared::impersonate(self, name)?
        } else {
            let request = Request {
                r#do: "user",
                user: Some(name.into()),
                ..Request::default()
            };
            self.ask(request).await?.path
        };
        let apply = PatchParams::apply("harness").force();
        let role_name = format!("harness:{name}");
        let metadata = ObjectMeta {
            name: Some(role_name.clone()),
            ..ObjectMeta::default()
        };
        let role = ClusterRole {
            metadata: metadata.clone(),
            rules: Some(rules.to_vec()),
            ..ClusterRole::default()
        };
        Api::<ClusterRole>::all(self.client())
            .patch(&role_name, &apply, &Patch::Apply(&role))
            .await
            .with_context(|| format!("the role of {name}"))?;
        let group = "rbac.authorization.k8s.io".to_owned();
        let subject = Subject {
            kind: "User".into(),
            name: name.into(),
            api_group: Some(group.clone()),
            namespace: None,
        };
        let binding = ClusterRoleBinding {
            metadata,
            role_ref: RoleRef {
                api_group: group,
                kind: "ClusterRole".into(),
                name: role_name.clone(),
            },
            subjects: Some(vec![subject]),
        };
        Api::<ClusterRoleBinding>::all(self.client())
            .patch(&role_name, &apply, &Patch::Apply(&binding))
            .await
            .with_context(|| format!("the binding of {name}"))?;
        self.wait_for_rules(name, rules).await?;
        Ok(kubeconfig)
    }

    /// The API server learns of roles through its own watch, so this polls until it knows them.
    async fn wait_for_rules(&self, user: &str, rules: &[PolicyRule]) -> anyhow::Result<()> {
        let first = |texts: &Option<Vec<String>>| texts.as_ref().and_then(|texts| texts.first().cloned());
        for rule in rules {
            let (Some(resource), Some(verb)) = (first(&rule.resources), rule.verbs.first()) else {
                continue;
            };
            let (resource, subresource) = match resource.split_once('/') {
                Some((resource, subresource)) => (resource.to_owned(), Some(subresource.to_owned())),
                None => (resource, None),
            };
            let attributes = ResourceAttributes {
                group: first(&rule.api_groups),
                resource: Some(resource),
                subresource,
                name: first(&rule.resource_names),
                verb: Some(verb.clone()),
                ..ResourceAttributes::default()
            };
            self.wait_until_allowed(user, attributes).await?;
        }
        Ok(())
    }

    async fn wait_until_allowed(&self, user: &str, attributes: ResourceAttributes) -> anyhow::Result<()> {
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(user.into()),
                resource_attributes: Some(attributes),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let answer = Api::all(self.client())
                .create(&PostParams::default(), &review)
                .await?;
            if answer.status.is_some_and(|status| status.allowed) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!(
                    "the API server does not know the rights of {user}: {:?}",
                    review.spec.resource_attributes
                );
            }
            sleep(Duration::from_millis(10)).await;
        }
    }
}
