{{/* What the operator may do in a namespace that it serves. No finalizers, no Secrets. It deletes only groups, old revisions and
the Service of a role that was taken away; the rest goes with the pool by owner references. deploy/operator.yaml holds the same
and says what each right is for. */}}
{{- define "twinpool.rules" -}}
- apiGroups: [serving.twinpool.dev]
  resources: [inferencepools]
  verbs: [get, list, watch]
- apiGroups: [serving.twinpool.dev]
  resources: [inferencepools/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [statefulsets, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [pods, pods/status]
  verbs: [patch]
{{- if eq .Values.scope "cluster" }}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list]
- apiGroups: [""]
  resources: [pods]
  verbs: [delete]
{{- end }}
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}

{{/* Rights on the Lease, in the release's namespace; "create" cannot be limited to a name. */}}
{{- define "twinpool.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [twinpool-operator]
  verbs: [get, update]
{{- end }}
