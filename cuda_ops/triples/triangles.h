// Triangles of a simple graph, an edge at a time. Host and device share this, so that a CPU can check what a GPU runs.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FXOPT_ANYWHERE __host__ __device__ __forceinline__
#else
#define FXOPT_ANYWHERE inline
#endif

namespace fxopt {

// Edges lead from lower nodes to higher, sorted by source and then by target; those of node u begin at starts[u].
struct Oriented {
  const int64_t* source;
  const int64_t* target;
  const int64_t* starts;
};

// Visit the triangles u < v < w of an edge u-v by the places of u-w and v-w: the rows of u and v are merged.
template <typename Visit>
FXOPT_ANYWHERE void each_triangle(const Oriented& graph, int64_t edge, Visit visit) {
  const int64_t v = graph.target[edge];
  const int64_t others_end = graph.starts[graph.source[edge] + 1], closing_end = graph.starts[v + 1];
  int64_t other = edge + 1, closing = graph.starts[v];
  while (other < others_end && closing < closing_end) {
    const int64_t left = graph.target[other], right = graph.target[closing];
    if (left == right) visit(other, closing);
    other += left <= right;
    closing += right <= left;
  }
}

FXOPT_ANYWHERE int64_t count_triangles(const Oriented& graph, int64_t edge) {
  int64_t count = 0;
  each_triangle(graph, edge, [&](int64_t, int64_t) { ++count; });
  return count;
}

// Write the triangles of an edge into the columns of found [3, total], from column `at`.
FXOPT_ANYWHERE void write_triangles(const Oriented& graph, int64_t edge, int64_t at, int64_t total, int64_t* found) {
  each_triangle(graph, edge, [&](int64_t other, int64_t closing) {
    found[at] = edge;
    found[total + at] = other;
    found[2 * total + at] = closing;
    ++at;
  });
}

// The tables of the sum of p q r g over triangles, with rows of channels, and their gradients; null is not wanted.
// order[e] is the row of edge e in p, q and r, and cell[e] its row in g.
struct Products {
  const int64_t* order;
  const int64_t* cell;
  const float *p, *q, *r, *g;
  float *of_p, *of_q, *of_r, *of_g;
  int64_t channels;
};

FXOPT_ANYWHERE void add(float* sum, float value) {
#ifdef __CUDA_ARCH__
  atomicAdd(sum, value);
#else
  *sum += value;
#endif
}

// Add what the triangles of one edge contribute in one channel. The sum over w is taken first: q r is summed once
// for p and for g, and written once.
FXOPT_ANYWHERE void add_products(const Oriented& graph, const Products& tables, int64_t edge, int64_t channel) {
  const int64_t own = tables.order[edge] * tables.channels + channel;
  const int64_t cell = tables.cell[edge] * tables.channels + channel;
  const float p = tables.p[own], g = tables.g[cell];
  float sum = 0;
  bool any = false;
  each_triangle(graph, edge, [&](int64_t other, int64_t closing) {
    const int64_t second = tables.order[other] * tables.channels + channel;
    const int64_t third = tables.order[closing] * tables.channels + channel;
    const float q = tables.q[second], r = tables.r[third];
    any = true;
    sum += q * r;
    if (tables.of_q) add(tables.of_q + second, p * r * g);
    if (tables.of_r) add(tables.of_r + third, p * q * g);
  });
  if (any && tables.of_p) tables.of_p[own] = sum * g;
  if (any && tables.of_g) add(tables.of_g + cell, p * sum);
}

}  // namespace fxopt
