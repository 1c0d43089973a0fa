{{- define "drayman.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "drayman.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "drayman.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "drayman.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The namespace of all namespaced objects. */}}
{{- define "drayman.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride }}
{{- end }}

{{/* The name of a component's objects: (dict "root" . "component" "node"), for those of one pool with "pool" and its name. */}}
{{- define "drayman.component" -}}
{{- printf "%s-%s" (include "drayman.fullname" .root) .component }}{{ with .pool }}-{{ . }}{{ end }}
{{- end }}

{{/* The same for cluster-scoped objects: releases with the same name may be in several namespaces. */}}
{{- define "drayman.cluster" -}}
{{- printf "%s.%s" (include "drayman.component" .) (include "drayman.namespace" .root) }}
{{- end }}

{{- define "drayman.serviceAccount" -}}
{{- $account := (index .root.Values .component).serviceAccount }}
{{- default (include "drayman.component" (omit . "pool")) $account.name }}
{{- end }}

{{- define "drayman.selectorLabels" -}}
app.kubernetes.io/name: {{ include "drayman.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
drayman.dev/node-pool: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Labels of an object. Those in "more" override commonLabels: YAML forbids duplicate keys. */}}
{{- define "drayman.labels" -}}
{{ include "drayman.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: drayman
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with mergeOverwrite (dict) (default dict .root.Values.commonLabels) (default dict .more) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of the pods of a component. */}}
{{- define "drayman.podLabels" -}}
{{- $own := (index .root.Values .component).podLabels }}
{{- toYaml (mergeOverwrite (dict) $own (fromYaml (include "drayman.labels" .))) }}
{{- end }}

{{- define "drayman.image" -}}
{{- $image := .Values.image }}
{{- $name := $image.repository }}
{{- with (default dict .Values.global).imageRegistry }}
{{- /* The part before the first slash is a registry if it has a dot or a port, or is localhost. */}}
{{- $name = printf "%s/%s" . (regexReplaceAll "^(localhost|[^/]*[.:][^/]*)/" $name "") }}
{{- end }}
{{- if $image.digest }}
{{- printf "%s@%s" $name $image.digest }}
{{- else }}
{{- printf "%s:%s" $name (default .Chart.AppVersion $image.tag) }}
{{- end }}
{{- end }}

{{/* The field imagePullSecrets of a pod, or nothing. */}}
{{- define "drayman.imagePullSecrets" -}}
{{- with concat (default list (default dict .Values.global).imagePullSecrets) .Values.imagePullSecrets | uniq -}}
imagePullSecrets:
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{/* Whether the cluster has structured mode (resource.k8s.io/v1): "true" or nothing. Helm without a cluster lists the APIs that it was
built with, so the version counts as well: no version before 1.34 serves v1. */}}
{{- define "drayman.structured" -}}
{{- if and (.Capabilities.APIVersions.Has "resource.k8s.io/v1") (semverCompare ">=1.34.0-0" .Capabilities.KubeVersion.Version) }}true{{ end }}
{{- end }}

{{/* Whether a component is installed: (dict "root" . "component" "controller"). "true" or nothing. In structured mode the scheduler
allocates, so there is no controller. */}}
{{- define "drayman.enabled" -}}
{{- if and (index .root.Values .component).enabled (or (eq .component "node") (not (include "drayman.structured" .root))) }}true{{ end }}
{{- end }}

{{/* Whether the server has admission policies, and tokens that name their node, both from 1.30 on: "true" or nothing. */}}
{{- define "drayman.admissionPossible" -}}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}true{{ end }}
{{- end }}

{{/* Whether a node's token is restricted to the objects of its node: "true" or nothing. */}}
{{- define "drayman.admissionPolicy" -}}
{{- if and .Values.node.enabled (ne .Values.admissionPolicy.enabled "never") (include "drayman.admissionPossible" .) }}true{{ end }}
{{- end }}

{{/* Security context that meets every Pod Security Standard. */}}
{{- define "drayman.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "drayman.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "drayman.logging" -}}
- --logging-format={{ .Values.logging.format }}
- --v={{ .Values.logging.verbosity }}
{{- end }}

{{/* The startup probe of a component, from its values. */}}
{{- define "drayman.startupProbe" -}}
startupProbe:
  httpGet:
    path: /livez
    port: health
  periodSeconds: {{ .startupProbe.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ .startupProbe.failureThreshold }}
{{- end }}

{{/* Rules to ask the API server who may read metrics. */}}
{{- define "drayman.reviewRules" -}}
{{- if .Values.monitoring.authentication.enabled }}
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{- end }}
{{- end }}

{{/* Directions that the policies restrict. Without ports of the API server, egress is left open. */}}
{{- define "drayman.policyTypes" -}}
{{- if .Values.networkPolicy.apiServerPorts }}[Ingress, Egress]{{ else }}[Ingress]{{ end }}
{{- end }}

{{/* Allowed egress: the API server and DNS. */}}
{{- define "drayman.egress" -}}
{{- if .Values.networkPolicy.apiServerPorts -}}
egress:
- ports:
  {{- range .Values.networkPolicy.apiServerPorts }}
  - port: {{ . }}
    protocol: TCP
  {{- end }}
- ports:
  - port: 53
    protocol: UDP
  - port: 53
    protocol: TCP
{{- end }}
{{- end }}

{{/* The policy of a Job that is a hook: (dict "me" (dict "root" . "component" "crds") "hook" "pre-install"). It has to be there before
the pod, and goes with it. */}}
{{- define "drayman.jobPolicy" -}}
{{- if .me.root.Values.networkPolicy.enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "drayman.component" .me }}
  namespace: {{ include "drayman.namespace" .me.root | quote }}
  labels:
    {{- include "drayman.labels" .me | nindent 4 }}
  annotations:
    helm.sh/hook: {{ .hook }}
    helm.sh/hook-weight: "-20"
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  podSelector:
    matchLabels:
      {{- include "drayman.selectorLabels" .me | nindent 6 }}
  policyTypes: {{ include "drayman.policyTypes" .me.root }}
  ingress: []
  {{- include "drayman.egress" .me.root | nindent 2 }}
{{- end }}
{{- end }}

{{/* The tolerations of the companions of all pools, as a JSON list. */}}
{{- define "drayman.companionTolerations" -}}
{{- $tolerations := default list .Values.node.tolerations }}
{{- range .Values.nodePools }}
{{- $tolerations = concat $tolerations (default list .tolerations) }}
{{- end }}
{{- toJson (uniq $tolerations) }}
{{- end }}

{{/* Pod fields that place a Job that is a hook: it runs where the controller may, or in structured mode, which has no controller, where
the companions may. Only the affinity to nodes counts: an affinity that keeps the controllers apart would leave no node to the Job. */}}
{{- define "drayman.jobNodes" -}}
{{- $owner := .Values.controller }}
{{- $tolerations := $owner.tolerations }}
{{- if include "drayman.structured" . }}
{{- $owner = .Values.node }}
{{- $tolerations = list }}
{{- range include "drayman.companionTolerations" . | fromJsonArray }}
{{- /* A toleration without a key tolerates all taints, and would place the Job also on nodes that are not ready. */}}
{{- $controlPlane := dict "key" "node-role.kubernetes.io/control-plane" "operator" "Exists" "effect" "NoSchedule" }}
{{- $tolerations = append $tolerations (ternary . $controlPlane (hasKey . "key")) }}
{{- end }}
{{- $tolerations = uniq $tolerations }}
{{- end }}
{{- with $owner.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with pick (default dict $owner.affinity) "nodeAffinity" }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The pod of a Job that is a hook: (dict "me" (dict "root" . "component" "crds") "account" "its account" "arguments" (list "crds")). */}}
{{- define "drayman.jobPod" -}}
{{- $root := .me.root -}}
metadata:
  labels:
    {{- include "drayman.labels" .me | nindent 4 }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ .account }}
  {{- with include "drayman.imagePullSecrets" $root }}{{ . | nindent 2 }}{{ end }}
  enableServiceLinks: false
  {{- with include "drayman.jobNodes" $root | trim }}{{ . | nindent 2 }}{{ end }}
  securityContext:
    {{- include "drayman.restrictedPod" $root | nindent 4 }}
  containers:
  - name: {{ .me.component }}
    image: {{ include "drayman.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    args: [{{ join ", " .arguments }}]
    {{- with $root.Values.controller.extraEnv }}
    env:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      {{- include "drayman.containerSecurity" $root | nindent 6 }}
    resources:
      {{- toYaml $root.Values.controller.resources | nindent 6 }}
{{- end }}

{{/* The resource that `helm test` requests in limits: that of the first kind of mode extended-resource or split, or nothing. */}}
{{- define "drayman.testResource" -}}
{{- $resource := "" }}
{{- range include "drayman.allKinds" . | fromJsonArray }}
{{- if and (not $resource) (has .mode (list "extended-resource" "split")) }}
{{- $resource = .resourceName }}
{{- end }}
{{- end }}
{{- $resource }}
{{- end }}

{{/* Pod fields of both pods of `helm test`: they run on the companions' nodes, including tainted ones. */}}
{{- define "drayman.testPod" -}}
restartPolicy: Never
{{- with include "drayman.imagePullSecrets" . }}{{ . | nindent 0 }}{{ end }}
automountServiceAccountToken: false
enableServiceLinks: false
nodeSelector:
  {{- toYaml .Values.node.nodeSelector | nindent 2 }}
{{- /* The device may be on a node of any pool. */}}
tolerations:
  {{- include "drayman.companionTolerations" . | fromJsonArray | toYaml | nindent 2 }}
securityContext:
  {{- include "drayman.restrictedPod" . | nindent 2 }}
{{- end }}

{{/* Container of both pods, without resources. */}}
{{- define "drayman.testContainer" -}}
name: test
image: {{ include "drayman.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [version]
securityContext:
  {{- include "drayman.containerSecurity" . | nindent 2 }}
{{- end }}

{{/* A duration such as 1m30s in milliseconds. */}}
{{- define "drayman.milliseconds" -}}
{{- $sum := 0 }}
{{- range regexFindAll "[0-9]+(ms|s|m)" . -1 }}
{{- $unit := regexFind "[a-z]+$" . }}
{{- $sum = add $sum (mul (trimSuffix $unit . | int64) (get (dict "ms" 1 "s" 1000 "m" 60000) $unit)) }}
{{- end }}
{{- $sum }}
{{- end }}

{{/* The entries of a kind that containerPaths can name, as a JSON list; null for a preset, which only the program knows. */}}
{{- define "drayman.entries" -}}
{{- if .paths }}
{{- toJson .paths }}
{{- else if .groups }}
{{- $all := list }}
{{- range .groups }}
{{- $all = concat $all .required (default list .optional) (default list .shared) }}
{{- end }}
{{- toJson $all }}
{{- else if .usb }}
{{- toJson (concat (default (list "bus") .usb.nodes) (default list .usb.optionalNodes)) }}
{{- else if .pci }}
{{- toJson (concat (default (list "vfio") .pci.nodes) (default list .pci.optionalNodes)) }}
{{- else -}}
null
{{- end }}
{{- end }}

{{/* The kinds of all pools, as a JSON list. */}}
{{- define "drayman.allKinds" -}}
{{- $kinds := .Values.deviceKinds }}
{{- range .Values.nodePools }}
{{- $kinds = concat $kinds (default list .deviceKinds) }}
{{- end }}
{{- toJson $kinds }}
{{- end }}

{{/* How many claims can hold a device of this kind at once. With these presets, every pod of a node can. */}}
{{- define "drayman.shares" -}}
{{- default (ternary 110 1 (has .preset (list "fuse" "hwrng" "kvm" "tun" "vhost-net"))) .shares }}
{{- end }}

{{/* Whether any of these kinds has the mode `both`: "true" or nothing. */}}
{{- define "drayman.modeBoth" -}}
{{- range . }}
{{- if eq (default "claims" .mode) "both" }}true{{ end }}
{{- end }}
{{- end }}

{{/* The affinity of the companions outside of all pools: node.affinity, and not the labels of any pool. A node is outside of a pool if
one of its labels differs, so each term becomes one term per label. */}}
{{- define "drayman.affinityOutsidePools" -}}
{{- $required := "requiredDuringSchedulingIgnoredDuringExecution" }}
{{- $terms := dig "nodeAffinity" $required "nodeSelectorTerms" (list (dict)) .Values.node.affinity }}
{{- range $pool := .Values.nodePools }}
{{- $outside := list }}
{{- range $term := $terms }}
{{- range $key, $value := $pool.nodeSelector }}
{{- $other := dict "key" $key "operator" "NotIn" "values" (list $value) }}
{{- $outside = append $outside (merge (dict "matchExpressions" (append (default list $term.matchExpressions) $other)) $term) }}
{{- end }}
{{- end }}
{{- $terms = $outside }}
{{- if gt (len $terms) 64 }}
{{- fail "The nodeSelectors of nodePools have so many labels that the nodes outside of all pools need more than 64 terms: select each pool by one label." }}
{{- end }}
{{- end }}
{{- toYaml (mergeOverwrite (deepCopy .Values.node.affinity) (dict "nodeAffinity" (dict $required (dict "nodeSelectorTerms" $terms)))) }}
{{- end }}
